"""The base of the extract families, and tokenizing with places.

1. A family states by class attributes how it treats labels, `output_schema` and texts that are too long. Its
   `wanted_of` reads the options of a call and refuses bad ones.
2. Families whose answers point into a text tokenize the text into token ids with places, in one window or in
   overlapping windows. Places count characters of the text as sent, whatever the tokenizer normalises.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from tokenizers import Tokenizer

from ipc.errors import InvalidInput
from ipc.wire.extraction import Classification
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import Adapter, Excess, ItemFailure
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.tokenizing import as_ids, rust_copy, stand_in

NOT_FINITE = ItemFailure("INFERENCE_ERROR", "the model gave a value that is not finite")
_OVERLAP = 8
"""Neighbouring windows share an eighth of their tokens."""


class ExtractAdapter(Adapter):
    """Base of the families that find something in an item.

    labels     "required": the caller names what to look for; "own": the labels of the model, which the caller may
               narrow; "unused": labels of the caller are ignored
    overflows  what may be done with texts that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`)
    schema     whether `output_schema` is honoured; otherwise `output_schema` is ignored
    asks       whether the instruction is read
    """

    labels: ClassVar[Literal["required", "own", "unused"]] = "unused"
    overflows: ClassVar[tuple[str, ...]] = ("truncate", "error")
    schema: ClassVar[bool] = False
    asks: ClassVar[bool] = False

    @property
    def uses(self) -> frozenset[str]:
        """All options of the family, and "labels", "output_schema" and "instruction" where the family reads these."""
        read = {"labels": self.labels != "unused", "output_schema": self.schema, "instruction": self.asks}
        return frozenset((*self.spec.options, *(name for name, used in read.items() if used)))

    @property
    def dims(self) -> dict[str, int]:
        """No vectors."""
        return {}

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse labels, overflow policies and options that this family cannot use."""
        super().refuse_unsupported(call)
        if not isinstance(call, ExtractCall):
            return
        self._refuse_labels(call)
        OptionReader(call).refuse_overflow(self.overflows)
        self.refuse_options(call)

    def _refuse_labels(self, call: ExtractCall) -> None:
        given = self.labels_of(call)
        if self.labels == "required" and not given:
            raise InvalidInput("params.labels: this model needs at least one label")
        if self.labels == "own":
            unknown = next((label for label in given if label not in self.own_labels), None)
            if unknown is not None:
                known = ", ".join(self.own_labels[:30])
                raise InvalidInput(
                    f"params.labels: {unknown[:64]!r} is not one of this model's labels: {known}"
                )

    def labels_of(self, call: ExtractCall) -> list[str]:
        """The labels to look for."""
        return call.labels

    @abstractmethod
    def wanted_of(self, call: ExtractCall) -> Any:
        """Labels and options of a call, in the family's own form. Raises `InvalidInput` that names field and limit."""

    def refuse_options(self, call: ExtractCall) -> None:
        """Refuse by `wanted_of`. A family may check less here if `prepare` checks the rest."""
        self.wanted_of(call)


def text_of(item: InputItem) -> str:
    """The item's text. Raises `InvalidInput` for an item without one."""
    if item.text is None:
        raise InvalidInput("an item needs a text")
    return item.text


def place_of(item: InputItem, call: Call) -> int:
    """The index of `item` in its request, for messages; `prepare` gets only some items of a request."""
    return next((index for index, other in enumerate(call.items) if other is item), 0)


def ranked(
    labels: Sequence[str], scores: Sequence[float], threshold: float | None = None
) -> list[Classification]:
    """Labels with their scores, the likeliest first, without scores below `threshold`."""
    pairs = sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1])
    return [Classification(label, score) for label, score in pairs if threshold is None or score >= threshold]


@dataclass(frozen=True, slots=True)
class Window:
    """One sequence of tokens of a text.

    kept    int64 [k], the tokens without the special ones, and without the one that stands for a text without tokens
    places  int64 [k, 2], start and end of each kept token in the text, in characters
    inner   bool [k], whether a kept token belongs to the word of the token before
    """

    sequence: TokenSequence
    kept: np.ndarray
    places: np.ndarray
    inner: np.ndarray


class OffsetTokenizer:
    """The tokenizer of one model with places, cut to `limit` tokens at the stored side.  Thread-safe."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        """Copy the Rust object of a transformers tokenizer. Raises ValueError when it has none."""
        stored = _cutter(tokenizer, limit, direction=tokenizer.truncation_side)
        stride = max(1, limit // _OVERLAP) if limit > _OVERLAP else 0
        self._cutting = {
            "truncate": stored,
            "error": stored,
            "truncate_left": _cutter(tokenizer, limit, direction="left"),
            "chunk": _cutter(tokenizer, limit, stride=stride),
        }
        self._special = int(stored.num_special_tokens_to_add(is_pair=False))
        self._uses_types = "token_type_ids" in tokenizer.model_input_names
        self._prefixed = bool(getattr(self._cutting["chunk"].model, "continuing_subword_prefix", None))
        self._unknown_id = tokenizer.unk_token_id
        self._stand_in = stand_in(tokenizer)

    def windows(self, texts: Sequence[str], overflow: str) -> list[tuple[list[Window], Excess | None]]:
        """The windows of each text (several only for "chunk"), and how much of the text was cut, if anything."""
        divided: list[tuple[list[Window], Excess | None]] = []
        for text, encoding in zip(texts, self._cutting[overflow].encode_batch(list(texts)), strict=True):
            encodings = [encoding, *encoding.overflowing] if overflow == "chunk" else [encoding]
            excess = None
            if overflow != "chunk" and encoding.overflowing:
                rest = sum(len(one) - self._special for one in encoding.overflowing)
                excess = Excess(len(encoding) + rest, len(encoding))
            divided.append(([self._window(text, one) for one in encodings], excess))
        return divided

    def _window(self, text: str, encoding: Any) -> Window:
        types = as_ids(encoding.type_ids) if self._uses_types and any(encoding.type_ids) else None
        text_places = np.flatnonzero(np.asarray(encoding.special_tokens_mask, dtype=np.int64) == 0)
        places = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)[text_places]
        inner = [self._is_inner(text, encoding, at) for at in text_places.tolist()]
        ids = as_ids(encoding.ids or [self._stand_in])
        return Window(TokenSequence(ids, types), text_places, places, np.asarray(inner, dtype=bool))

    def _is_inner(self, text: str, encoding: Any, at: int) -> bool:
        """Whether a token continues a word, by transformers' rule (token_classification.py: gather_pre_entities)."""
        token = encoding.ids[at]
        if token == self._unknown_id:
            return False
        start, end = encoding.offsets[at]
        if self._prefixed:
            return len(self._cutting["chunk"].id_to_token(token) or "") != end - start
        return start > 0 and " " not in text[start - 1 : start + 1]


def _cutter(tokenizer: Any, limit: int, *, stride: int = 0, direction: str = "right") -> Tokenizer:
    """A copy of a Rust tokenizer that cuts at `limit` tokens, special tokens included."""
    backend = rust_copy(tokenizer, "places in the text need it")
    backend.enable_truncation(limit, stride=stride, direction=direction)
    return backend
