"""Late chunking: which tokens of a tokenized document belong to each chunk, and the mean of their vectors.

1. A token belongs to the chunk that holds the token's last character: a blank before a word may be part of a token.
2. Special tokens and the prompt around the text belong to no chunk.
3. A sentence ends behind a full stop, a question mark, an exclamation mark or an ellipsis before a blank, behind such
   marks of Chinese and Japanese, and at a line break.

Late chunking is arXiv 2409.04701: all tokens of the document see each other before the pooling.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ipc.wire.messages import MAX_CHUNKS, Chunking
from workers.adapters.shared.packing import Int64Array

# NOTE: nothing here is read twice: each run of marks begins where the character before is no mark.
_BORDER = re.compile(
    r"""(?<![.!?\u2026])[.!?\u2026]++["'\u201d\u2019\u00bb)\]]*+(?=\s)"""
    r"""|(?<![\u3002\uff01\uff1f])[\u3002\uff01\uff1f]++[\u201d\u2019\u300d\u300f\uff09]*+|\n++"""
)


class Chunks(NamedTuple):
    """The chunks of one document.

    ranges  int64 [chunks, 2], first token and the token behind the last, counted in the tokenized text
    spans   int32 [chunks, 2], the same in characters of the text
    """

    ranges: Int64Array
    spans: np.ndarray


def chunks_of(
    text: str, places: Int64Array, tokens: Int64Array, rule: Chunking, given: Sequence[Sequence[int]]
) -> Chunks:
    """Lay the chunks of a text over its tokens.

    `places` int64 [n, 2] are the characters of the text's own tokens, `tokens` int64 [n] their numbers in the tokenized
    text. `given` are spans that the request states. Raises ValueError that names the chunk and the limit.
    """
    if rule.by == "tokens":
        groups = windows(len(tokens), rule.size, rule.overlap)
        spans = np.array([(places[a][0], places[b - 1][1]) for a, b in groups], np.int32).reshape(-1, 2)
    else:
        spans = np.array(given if rule.by == "spans" else _of_sentences(text, rule), np.int32).reshape(-1, 2)
        # NOTE: a token is in a chunk if start < end of the token <= stop.
        ends = np.searchsorted(places[:, 1], spans, side="right")
        groups = [(int(a), int(b)) for a, b in ends]
    if len(spans) > MAX_CHUNKS:
        raise ValueError(f"late_chunking: {len(spans)} chunks, the limit is {MAX_CHUNKS}")
    if rule.by == "sentences":
        kept = [at for at, (a, b) in enumerate(groups) if a < b]
        groups, spans = [groups[at] for at in kept], spans[kept]
    for at, (a, b) in enumerate(groups):
        if a >= b:
            start, stop = spans[at]
            raise ValueError(f"late_chunking: chunk {at}, characters {start} to {stop}, holds no token")
    ranges = np.array([(tokens[a], tokens[b - 1] + 1) for a, b in groups], np.int64).reshape(-1, 2)
    return Chunks(ranges, spans)


def windows(count: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Places of windows over `count` things, the last of which may be shorter."""
    found = []
    for start in range(0, count, size - overlap):
        found.append((start, min(start + size, count)))
        if start + size >= count:
            break
    return found


def _of_sentences(text: str, rule: Chunking) -> list[tuple[int, int]]:
    each = sentences(text)
    return [(each[a][0], each[b - 1][1]) for a, b in windows(len(each), rule.size, rule.overlap)]


def sentences(text: str) -> list[tuple[int, int]]:
    """Characters of each sentence, without the blanks around the sentence."""
    borders = [0, *(found.end() for found in _BORDER.finditer(text)), len(text)]
    found = []
    for start, stop in pairwise(borders):
        part = text[start:stop]
        stripped = part.strip()
        if stripped:
            start += len(part) - len(part.lstrip())
            found.append((start, start + len(stripped)))
    return found


def means(rows: torch.Tensor, ranges: Int64Array) -> torch.Tensor:
    """fp32 [chunks, width]: the mean of the token vectors [T, width] in each of `ranges` [chunks, 2]."""
    if not len(ranges):
        return rows.new_zeros((0, rows.shape[1]), dtype=torch.float32)
    lengths = ranges[:, 1] - ranges[:, 0]
    before = np.cumsum(lengths) - lengths
    places = np.repeat(ranges[:, 0] - before, lengths) + np.arange(lengths.sum())
    picked = rows.index_select(0, torch.from_numpy(places).to(rows.device)).float()
    counts = torch.from_numpy(lengths).to(rows.device)
    return torch.segment_reduce(picked, "mean", lengths=counts, axis=0, unsafe=True)
