"""The answer to a request of named tensors, as both tensor protocols render it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from frontend.engine.answer import Answer

INLINE_CLASSES = 512
"""Entries of classifications above this number are work for a thread: each is text, or a message of its own."""


class TopClass(NamedTuple):
    """One entry of a classification: the value, its index among the elements of its row, and the label ("": none)."""

    value: float
    index: int  # type: ignore[assignment]
    label: str


@dataclass(slots=True)
class OutputTensor:
    """One output. `shape` includes the batch dimension of a model that batches.

    `data` are the raw bytes, valid while the answer is open; None when they were written to a client's region, or when
    `classes`, the highest entries of each row, were asked for instead.
    """

    name: str
    datatype: str
    shape: list[int]
    data: memoryview | None
    nbytes: int = 0
    classes: list[list[TopClass]] | None = None


@dataclass(slots=True)
class TensorResult:
    """What was computed; `version` is the one that answered. Its tensors are valid while `answer` is open.

    `batches`: whether that version has a batch dimension, which is the first of its shapes then.
    """

    model: str
    version: int
    outputs: list[OutputTensor]
    answer: Answer
    rows: int = 1
    batches: bool = False
    parameters: dict[str, bool | int | float | str] = field(default_factory=dict)

    @property
    def has_many_classes(self) -> bool:
        """Whether rendering its classifications is long work."""
        ranked = (output.classes for output in self.outputs if output.classes)
        return sum(len(rows) * len(rows[0]) for rows in ranked) > INLINE_CLASSES
