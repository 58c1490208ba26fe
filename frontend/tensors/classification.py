"""The highest entries of each row of an output, with the labels of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from frontend.http.rendering import off_loop
from frontend.tensors.request import WantedOutput
from frontend.tensors.result import OutputTensor, TopClass
from ipc.errors import InvalidInput
from ipc.memory.datatypes import DATATYPES

if TYPE_CHECKING:
    from frontend.tensors.models import TensorModel

MOST_ELEMENTS = 1_000_000
"""Elements of a tensor that is still ranked."""
RANKED = frozenset(("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64"))
"""Datatypes whose values can be ranked."""
INLINE_ELEMENTS = 1 << 14
"""Tensors with more elements are ranked in a thread."""


async def classify(
    outputs: list[OutputTensor], wanted: Sequence[WantedOutput], model: TensorModel, rows: int
) -> None:
    """Put `classes` in the place of the data of those outputs that are wanted so, one list for each of `rows`.

    The values are read while the answer is open. Raises `InvalidInput` as `check_ranked`, for what only the result
    tells.
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
        # PERF: only what reaches the last place is sorted; ties with it stay in, so that the lowest index wins.
        last = np.partition(keys, len(keys) - count)[len(keys) - count] if count else None
        places = np.flatnonzero(keys >= last) if count else places[:0]
    backwards = places[::-1]
    order = backwards[np.argsort(keys[backwards], kind="stable")][::-1][:count]
    return row[order].tolist(), order.tolist()
