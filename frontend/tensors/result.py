"""The answer to a request of named tensors, as both tensor protocols render it.

`classify` replaces the data of an output by the highest entries of each row, with the labels of their classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from frontend.engine.answer import Answer
from frontend.http.threads import off_loop
from frontend.tensors.request import WantedOutput
from ipc.errors import InvalidInput
from ipc.memory.datatypes import DATATYPES

if TYPE_CHECKING:
    from frontend.tensors.models import TensorModel

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
    """The outputs of version `version` of a model. The tensors are valid while `answer` is open.

    `batches`: whether the version has a batch dimension, the first of each shape.
    """

    model: str
    version: int
    outputs: list[OutputTensor]
    answer: Answer
    rows: int = 1
    batches: bool = False

    @property
    def has_many_classes(self) -> bool:
        """Whether rendering the classifications is long work."""
        ranked = (output.classes for output in self.outputs if output.classes)
        return sum(len(rows) * len(rows[0]) for rows in ranked) > INLINE_CLASSES


MOST_ELEMENTS = 1_000_000
"""Elements of a tensor that is still ranked."""
RANKED = frozenset(("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"))
"""Datatypes whose values can be ranked."""
INLINE_ELEMENTS = 1 << 14
"""Tensors with more elements are ranked in a thread."""


async def classify(
    outputs: list[OutputTensor], wanted: Sequence[WantedOutput], model: TensorModel, rows: int
) -> None:
    """Replace the data of outputs that are wanted as classes by `classes`, one list for each of `rows`.

    The answer must be open. Raises `InvalidInput` as `check_ranked`, since some shapes are known from the result only.
    """
    counts = {one.name: one.classes for one in wanted if one.classes is not None}
    for output in outputs if counts else ():
        count = counts.get(output.name)
        if count is None:
            continue
        assert output.data is not None
        datatype = DATATYPES[output.datatype]
        where = f"output '{output.name}' for model '{model.name}'"
        check_ranked(output.datatype, output.nbytes // (datatype.nbytes or 1), where)
        values = np.frombuffer(output.data, datatype.array).reshape(rows, -1)
        labels = model.outputs[output.name].labels
        if values.size > INLINE_ELEMENTS:
            output.classes = await off_loop(top, values, count, labels)
        else:
            output.classes = top(values, count, labels)
        output.data = None


def check_ranked(datatype: str, elements: int, where: str) -> None:
    """Raise `InvalidInput` when an output cannot be ranked: for its datatype, or for its number of elements."""
    if datatype not in RANKED:
        raise InvalidInput(f"class result not available for {where}: values of {datatype} are not ranked")
    if elements > MOST_ELEMENTS:
        raise InvalidInput(
            f"class result not available for {where}: {elements} elements, the limit is {MOST_ELEMENTS}"
        )


def top(values: np.ndarray, count: int, labels: Sequence[str]) -> list[list[TopClass]]:
    """The min(count, elements) highest entries of each row of [rows, elements], highest first, ties by lower index.

    NaN ranks below everything. `labels` name the elements by index; one that is missing is empty.
    """
    return [_top_of_row(row, count, labels) for row in values]


def _top_of_row(row: np.ndarray, count: int, labels: Sequence[str]) -> list[TopClass]:
    return [
        TopClass(value, index, labels[index] if index < len(labels) else "")
        for value, index in zip(*_ranked(row, count), strict=True)
    ]


def _ranked(row: np.ndarray, count: int) -> tuple[list[float], list[int]]:
    """Values and indices of the highest entries, in order."""
    keys = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    places = np.arange(len(keys))
    if count < len(keys):
        # PERF: only values that reach the last place are sorted; ties stay, so that the lowest index wins.
        last = np.partition(keys, len(keys) - count)[len(keys) - count] if count else None
        places = np.flatnonzero(keys >= last) if count else places[:0]
    backwards = places[::-1]
    order = backwards[np.argsort(keys[backwards], kind="stable")][::-1][:count]
    return row[order].tolist(), order.tolist()
