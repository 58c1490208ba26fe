"""What the extract families share: no vectors, and one place that refuses what a family cannot use.

A family states by class attributes how it treats labels, `output_schema` and texts that are too long; its own `check`
reads the options, which refuses bad ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from ipc.errors import InvalidInput
from ipc.wire.extraction import Classification
from ipc.wire.messages import Call, ExtractCall, InputItem
from workers.adapters.base import Adapter, ItemFailure
from workers.adapters.shared.options import OptionReader

if TYPE_CHECKING:
    from workers.adapters.shared.classification import SequenceClassifier, TokenClassifier

NOT_FINITE = ItemFailure("INFERENCE_ERROR", "the model gave a value that is not finite")


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

    def check(self, call: Call) -> None:
        """Refuse what this family cannot use, before anything is queued."""
        super().check(call)
        if not isinstance(call, ExtractCall):
            return
        self._check_labels(call)
        OptionReader(call).check_overflow(self.overflows)
        self.check_options(call)

    def _check_labels(self, call: ExtractCall) -> None:
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
    def check_options(self, call: ExtractCall) -> None:
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
