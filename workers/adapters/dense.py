"""Dense text embeddings: one vector per text.

Serves any directory in the sentence-transformers layout and plain transformers checkpoints.

1. `prepare` puts the prompt around each text and tokenizes; a text that is too long may become several windows.
2. `collate` packs the sequences into one row without padding.
3. `encode` runs the transformer, pools each sequence, applies the layers after the pooling (Dense, LayerNorm,
   Normalize), all in fp32, and restores the order of the items. A stored `truncate_dim` cuts the vectors last.

With late chunking the pooling takes the tokens of each chunk in turn (`means`).

`chunks_of` says which tokens of a tokenized document belong to each chunk:

1. A token belongs to the chunk that holds the token's last character: a blank before a word may be part of a token.
2. Special tokens and the prompt around the text belong to no chunk.
3. A sentence ends behind a full stop, a question mark, an exclamation mark or an ellipsis before a blank, behind such
   marks of Chinese and Japanese, and at a line break.

Late chunking is arXiv 2409.04701: all tokens of the document see each other before the pooling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ipc.wire.messages import MAX_CHUNKS, Call, Chunking, EncodeCall, InputItem
from workers.adapters.base import (
    AdapterSpec,
    ChunkRows,
    Excess,
    ItemFailure,
    ItemRefused,
    LoadContext,
    Prepared,
    SparseRows,
)
from workers.adapters.shared.checkpoint import attends_causally
from workers.adapters.shared.heads import Normalize, build_head, pool
from workers.adapters.shared.packing import Int64Array
from workers.adapters.shared.sentence_transformers_layout import (
    ModelLayout,
    ModuleConfig,
    read_layout,
    resolve_modes,
)
from workers.adapters.shared.text_model import (
    TextAdapter,
    TextBatch,
    TextModel,
    TextPayload,
    mean_of_windows,
    sequence_of,
)

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
        full = [at for at, (a, b) in enumerate(groups) if a < b]
        groups, spans = [groups[at] for at in full], spans[full]
    for at, (a, b) in enumerate(groups):
        if a >= b:
            start, stop = spans[at]
            raise ValueError(f"late_chunking: chunk {at}, characters {start} to {stop}, holds no token")
    ranges = np.array([(tokens[a], tokens[b - 1] + 1) for a, b in groups], np.int64).reshape(-1, 2)
    return Chunks(ranges, spans)


def windows(count: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Places of windows over `count` things, the last of which may be shorter."""
    spans = []
    for start in range(0, count, size - overlap):
        spans.append((start, min(start + size, count)))
        if start + size >= count:
            break
    return spans


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


class DenseAdapter(TextAdapter):
    """A transformer, a pooling and the layers after it."""

    spec: ClassVar[AdapterSpec] = AdapterSpec(
        family="dense",
        operations=("encode",),
        inputs=("text",),
        outputs=("dense",),
        lora=True,
    )

    def __init__(self, text: TextModel, layout: ModelLayout) -> None:
        """Put the parts together; `layout.pooling` is resolved."""
        self._pooling, self._kept = layout.pooling or ("mean",), layout.truncate_dim
        last = layout.vector_modules[-1:]
        self._normalize = bool(last) and last[0].kind == "Normalize"
        before = layout.vector_modules[:-1] if self._normalize else layout.vector_modules
        self._token_head = _stack(layout.token_modules, text.encoder.device)
        self._vector_head = _stack(before, text.encoder.device)
        super().__init__(text, self._token_head, self._vector_head)
        self._width = self._proof_width()

    @classmethod
    def load(cls, context: LoadContext) -> DenseAdapter:
        """Load layout, tokenizer and weights; progress phases are "tokenizer", "weights" and "proof"."""
        layout = read_layout(context.directory)
        text = TextModel.build(context, layout)
        layout = _with_options(layout, context.options, causal=attends_causally(text.encoder.model))
        adapter = cls(text, layout)
        context.progress("proof", 1.0)
        return adapter

    @property
    def dims(self) -> dict[str, int]:
        """Width of the dense output."""
        return {"dense": self._width}

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Tokenize with prompts; raises ValueError for an item with neither text nor ids."""
        if isinstance(call, EncodeCall) and call.chunking is not None:
            before, after = self._text.affixes(call)
            return [self._document(item, before, after, call.chunking) for item in items]
        payloads = self._text.payloads(items, call)
        return [payload.prepared(truncated) for payload, truncated in payloads]

    def _document(self, item: InputItem, before: str, after: str, rule: Chunking) -> Prepared:
        """A document whole, with the tokens of its chunks. Raises `ItemRefused` for chunks that it cannot have.

        A document over the model's length is marked as truncated, and has no chunks.
        """
        if item.text is None:
            raise ItemRefused(item, "late_chunking: expected a text")
        text = item.text
        tokens, places, count = self._text.tokenizer.placed(f"{before}{text}{after}")
        sequence = sequence_of(tokens)
        if tokens.truncated:
            payload = TextPayload((sequence,), excess=Excess(count, self._text.limit))
            return payload.prepared(True)
        places = places - len(before)
        own = np.flatnonzero((places[:, 1] > 0) & (places[:, 1] <= len(text)))
        try:
            chunks = chunks_of(text, places[own].clip(0), own, rule, item.spans)
        except ValueError as error:
            raise ItemRefused(item, str(error)) from error
        return Prepared(TextPayload((sequence,), extra=chunks), len(tokens.ids), rows=len(chunks.ranges))

    @property
    def chunk_refusal(self) -> str:
        """Only a mean of token vectors has a counterpart for a part of the text."""
        if self._pooling != ("mean",):
            return f"needs a model with mean pooling, this model pools by {', '.join(self._pooling)}"
        return (
            ""
            if self._text.tokenizer.tells_places
            else "the tokenizer of this model tells no places of tokens"
        )

    def encode(self, batch: TextBatch, outputs: frozenset[str]) -> dict[str, torch.Tensor | SparseRows]:
        """{"dense": fp32 [n, dims]} on the device; raises ValueError for any other output."""
        if outputs != frozenset({"dense"}):
            raise ValueError(
                f"this model gives dense vectors only, not {', '.join(sorted(outputs)) or 'nothing'}"
            )
        return {"dense": self._vectors(batch)}

    @torch.inference_mode()
    def _vectors(self, batch: TextBatch) -> torch.Tensor:
        """fp32 [n, dims]. The vector of a text in several windows is their mean, taken before normalising."""
        vectors_of_windows = []
        for _, packed, rows in self._text.run(batch):
            if len(self._token_head):
                rows = self._token_head(rows.float())
            vectors = self._vector_head(pool(rows, packed.layout, self._pooling, packed.skips))
            vectors_of_windows.append(vectors.index_select(0, packed.restore))
        return self._finished(mean_of_windows(vectors_of_windows, batch))

    def _finished(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors of length 1 where the model ends so, and of those the values that are kept."""
        whole = F.normalize(vectors, p=2, dim=-1) if self._normalize else vectors
        return whole[:, : self._kept]

    @torch.inference_mode()
    def encode_chunks(self, batch: TextBatch) -> ChunkRows:
        """A vector for each chunk of each document, all from one pass over the documents."""
        chunk_means = []
        for row, _, rows in self._text.run(batch):
            if len(self._token_head):
                rows = self._token_head(rows.float())
            firsts = row.packed.layout.first.numpy()[row.packed.restore.numpy()]
            ranges = [
                first + batch.payloads[at].extra.ranges for first, at in zip(firsts, row.owners, strict=True)
            ]
            chunk_means.append(means(rows, np.concatenate(ranges)))
        spans = [payload.extra.spans for payload in batch.payloads]
        return ChunkRows(self._finished(self._vector_head(torch.cat(chunk_means))), spans)

    def _proof_width(self) -> int:
        """The width of the vector of an empty text. Raises RuntimeError for values that are not finite."""
        [window] = self._text.tokenizer.windows([""])[0].windows
        vectors = self._vectors(self._text.collate([TextPayload((sequence_of(window),))]))
        if not bool(torch.isfinite(vectors).all()):
            raise RuntimeError("the model's first vector is not finite")
        return vectors.shape[1]


def _with_options(layout: ModelLayout, options: Mapping[str, Any], *, causal: bool) -> ModelLayout:
    """The layout with the catalog's `pooling` and `normalize`, or with defaults for a plain checkpoint."""
    plain = layout.pooling is None
    if options.get("pooling") is not None:
        layout = replace(layout, pooling=resolve_modes(options["pooling"]))
    elif plain:
        layout = replace(layout, pooling=("lasttoken" if causal else "mean",))
    others = tuple(module for module in layout.vector_modules if module.kind != "Normalize")
    stored = len(others) != len(layout.vector_modules)
    normalized = bool(options.get("normalize", True if plain else stored))
    if normalized == stored:
        return layout
    normalize = (ModuleConfig("Normalize", layout.transformer, {}),) if normalized else ()
    return replace(layout, vector_modules=(*others, *normalize))


def _stack(modules: Sequence[ModuleConfig], device: torch.device) -> nn.Sequential:
    """The layers of one stage in fp32 on `device`."""
    heads = [
        Normalize() if m.kind == "Normalize" else build_head(m.kind, m.directory, m.config) for m in modules
    ]
    return nn.Sequential(*heads).to(device).eval().requires_grad_(False)
