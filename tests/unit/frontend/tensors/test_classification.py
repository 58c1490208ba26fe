"""The highest entries of a row, against a plain sort."""

from __future__ import annotations

import math

import numpy as np
import pytest

from frontend.tensors.result import MOST_ELEMENTS, check_ranked, top
from ipc.errors import InvalidInput


def sorted_by_hand(row: np.ndarray, count: int) -> list[tuple[object, int]]:
    """(value, index), highest first, ties by lower index, NaN last."""
    values = row.tolist()
    keys = [-math.inf if value != value else value for value in values]
    order = sorted(range(len(values)), key=lambda at: (-keys[at], at))[:count]
    return [(values[at], at) for at in order]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint64", "int64", "float32", "float64"])
@pytest.mark.parametrize("count", [1, 2, 5, 39, 40, 41, 1000])
def test_the_highest_come_first_and_ties_by_lower_index(dtype: str, count: int) -> None:
    rows = np.random.default_rng(7).integers(0, 12, (3, 40)).astype(dtype)
    found = top(rows, count, ())
    assert [[(entry.value, entry.index) for entry in row] for row in found] == [
        sorted_by_hand(row, count) for row in rows
    ]


def test_values_at_the_ends_of_their_type_keep_their_order() -> None:
    unsigned = np.array([[0, 2**64 - 1, 2**63, 2**64 - 2]], np.uint64)
    assert [entry.value for entry in top(unsigned, 4, ())[0]] == [2**64 - 1, 2**64 - 2, 2**63, 0]
    signed = np.array([[-(2**63), 2**63 - 1, 0]], np.int64)
    assert [entry.index for entry in top(signed, 2, ())[0]] == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_what_is_no_number_ranks_below_everything(count: int) -> None:
    row = np.array([[math.nan, -math.inf, 1.0, math.nan, math.inf]], np.float32)
    indices = [entry.index for entry in top(row, count, ())[0]]
    assert indices == [4, 2, 0, 1, 3][:count]


def test_labels_are_lines_by_index_and_may_be_too_few() -> None:
    found = top(np.array([[1, 3, 2]], np.float32), 3, ("a", "b"))[0]
    assert [(entry.label, entry.value, entry.index) for entry in found] == [
        ("b", 3.0, 1),
        ("", 2.0, 2),
        ("a", 1.0, 0),
    ]


def test_no_elements_have_no_classes() -> None:
    assert top(np.zeros((2, 0), np.float32), 3, ()) == [[], []]


def test_a_million_elements_are_the_limit() -> None:
    check_ranked("FP32", MOST_ELEMENTS, "x")
    with pytest.raises(InvalidInput, match="1000001 elements, the limit is 1000000"):
        check_ranked("FP32", MOST_ELEMENTS + 1, "x")


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL", "BYTES"])
def test_other_datatypes_have_no_classes(datatype: str) -> None:
    with pytest.raises(InvalidInput, match="class result not available for x"):
        check_ranked(datatype, 1, "x")
