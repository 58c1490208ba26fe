"""Tokenize texts for answers that point into them: token ids with their places, in one window or in overlapping ones.

Places count characters of the text as it was sent, whatever the tokenizer normalises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from workers.adapters.base import Excess
from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.tokenizing import as_ids

_OVERLAP = 8
"""Neighbouring windows share one part in so many of their tokens."""


@dataclass(frozen=True, slots=True)
class Window:
    """One sequence of tokens of a text.

    kept    int64 [k], the tokens that are no special ones
    places  int64 [k, 2], start and end of each kept token in the text, in characters
    inner   bool [k], whether a kept token goes on with the word of the token before it
    """

    sequence: TokenSequence
    kept: np.ndarray
    places: np.ndarray
    inner: np.ndarray


class OffsetTokenizer:
    """The tokenizer of one model with places, cut to `limit` tokens.  Thread-safe."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        """Copy the Rust object of a transformers tokenizer. Raises ValueError when it has none."""
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer of this model is not a fast one; places in the text need it")
        text = tokenizer.backend_tokenizer.to_str()
        self._cutting = {
            "truncate": _cut(text, limit),
            "error": _cut(text, limit),
            "truncate_left": _cut(text, limit, direction="left"),
            "chunk": _cut(text, limit, stride=max(1, limit // _OVERLAP) if limit > _OVERLAP else 0),
        }
        self._special = int(self._cutting["error"].num_special_tokens_to_add(is_pair=False))
        self._uses_types = "token_type_ids" in tokenizer.model_input_names
        self._prefixed = bool(getattr(self._cutting["chunk"].model, "continuing_subword_prefix", None))
        self._unknown_id = tokenizer.unk_token_id
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self.pad_id = int(tokenizer.pad_token_id or 0)

    def windows(self, texts: Sequence[str], overflow: str) -> list[tuple[list[Window], Excess | None]]:
        """The windows of each text (more than one only for "chunk"), and how much of it was cut, if anything."""
        found: list[tuple[list[Window], Excess | None]] = []
        for text, encoding in zip(texts, self._cutting[overflow].encode_batch(list(texts)), strict=True):
            encodings = [encoding, *encoding.overflowing] if overflow == "chunk" else [encoding]
            excess = None
            if overflow != "chunk" and encoding.overflowing:
                rest = sum(len(one) - self._special for one in encoding.overflowing)
                excess = Excess(len(encoding) + rest, len(encoding))
            found.append(([self._window(text, one) for one in encodings], excess))
        return found

    def _window(self, text: str, encoding: Any) -> Window:
        types = as_ids(encoding.type_ids) if self._uses_types and any(encoding.type_ids) else None
        kept = np.flatnonzero(np.asarray(encoding.special_tokens_mask, dtype=np.int64) == 0)
        places = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)[kept]
        inner = [self._is_inner(text, encoding, at) for at in kept.tolist()]
        return Window(TokenSequence(as_ids(encoding.ids), types), kept, places, np.asarray(inner, dtype=bool))

    def _is_inner(self, text: str, encoding: Any, at: int) -> bool:
        """transformers' rule of what continues a word (pipelines/token_classification.py: gather_pre_entities)."""
        token = encoding.ids[at]
        if token == self._unknown_id:
            return False
        start, end = encoding.offsets[at]
        if self._prefixed:
            return len(self._cutting["chunk"].id_to_token(token) or "") != end - start
        return start > 0 and " " not in text[start - 1 : start + 1]


def _cut(text: str, limit: int, *, stride: int = 0, direction: str = "right") -> Tokenizer:
    """A copy of a Rust tokenizer that cuts at `limit` tokens, special tokens included."""
    backend: Tokenizer = Tokenizer.from_str(text)
    backend.no_padding()
    backend.enable_truncation(limit, stride=stride, direction=direction)
    return backend
