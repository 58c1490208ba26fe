"""What the extract families share: no vectors, one place that refuses what a family cannot use, and places in texts.

1. A family states by class attributes how it treats labels, `output_schema` and texts that are too long; its own
   `check` reads the options, which refuses bad ones.
2. Families whose answers point into a text tokenize it into token ids with their places, in one window or in
   overlapping ones. Places count characters of the text as it was sent, whatever the tokenizer normalises.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from tokenizers import Tokenizer

from ipc.errors import InvalidInput
from ipc.wire.extraction import Classification
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import Adapter, Excess, ItemFailure
from workers.adapters.shared.options import OptionReader
from workers.adapters.shared.packing import TokenSequence
from workers.adapters.shared.tokenizing import as_ids

if TYPE_CHECKING:
    from workers.adapters.shared.classification import SequenceClassifier, TokenClassifier

NOT_FINITE = ItemFailure("INFERENCE_ERROR", "the model gave a value that is not finite")


_OVERLAP = 8
"""Neighbouring windows share one part in so many of their tokens."""


class ExtractAdapter(Adapter):
    """Base of the families that find something in an item.

    labels      "required": the caller names what to look for; "own": the model's own, which the caller's may narrow;
                "unused": ignored
    overflows   what may be done with texts that are too long (`ipc.catalog.option_names.OVERFLOW_POLICIES`)
    schema      whether `output_schema` is honoured; where it is not, it is ignored
    asks        whether the instruction is read
    """

    labels: ClassVar[Literal["required", "own", "unused"]] = "unused"
    overflows: ClassVar[tuple[str, ...]] = ("truncate", "error")
    schema: ClassVar[bool] = False
    asks: ClassVar[bool] = False

    @property
    def uses(self) -> frozenset[str]:
        """Its options, and those of labels, schema and instruction that it reads."""
        read = {"labels": self.labels != "unused", "output_schema": self.schema, "instruction": self.asks}
        return frozenset((*self.spec.options, *(name for name, used in read.items() if used)))

    @property
    def dims(self) -> dict[str, int]:
        """Nothing here has a width."""
        return {}

    @property
    def own_labels(self) -> Sequence[str]:
        """The labels that the model itself knows; empty where the caller brings them."""
        return ()

    def refuse_unsupported(self, call: Call) -> None:
        """Refuse what this family cannot use, before anything is queued."""
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
        """What the call asks to look for."""
        return call.labels

    @abstractmethod
    def refuse_options(self, call: ExtractCall) -> None:
        """Read the options once; raises `InvalidInput` for one that cannot be used."""


class ClassifierAdapter(ExtractAdapter):
    """Base of the families around a classification head; `limit` is the longest sequence in tokens."""

    def __init__(self, classifier: SequenceClassifier | TokenClassifier, limit: int) -> None:
        self._limit, self._memory_bytes = limit, classifier.memory_bytes
        self.packed = classifier.packed

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, special tokens included."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """Bytes held by weights and buffers."""
        return self._memory_bytes


def text_of(item: InputItem) -> str:
    """The item's text. Raises `InvalidInput` for an item without one."""
    if item.text is None:
        raise InvalidInput("an item needs a text")
    return item.text


def place_of(item: InputItem, call: Call) -> int:
    """The index of `item` in its request, for messages; `prepare` sees only a part of the items."""
    return next((index for index, other in enumerate(call.items) if other is item), 0)


def ranked(
    labels: Sequence[str], scores: Sequence[float], threshold: float | None = None
) -> list[Classification]:
    """Labels with their scores, the likeliest first; those below `threshold` are left out."""
    pairs = sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1])
    return [Classification(label, score) for label, score in pairs if threshold is None or score >= threshold]


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
