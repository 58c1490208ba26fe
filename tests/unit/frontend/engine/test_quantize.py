"""Output dtypes against the contract's formulas, worked out number by number in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from frontend.engine.answer import OUTPUT_DTYPES, quantize, shorten
from ipc.errors import InferenceFailed

FINITE = st.floats(-(2.0**100), 2.0**100, allow_nan=False, allow_subnormal=False, width=32)
ROWS = arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=FINITE)


def single(value: Fraction) -> Fraction:
    """The float32 nearest to an exact value, ties to even."""
    if value == 0:
        return value
    sign, size = (-1, -value) if value < 0 else (1, value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    return sign * round(size / step) * step  # round() of a Fraction rounds half to even


def exact(value: np.floating) -> Fraction:
    """A float as a fraction."""
    return Fraction(float(value))


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_int8_is_division_then_127_then_round_half_even_each_in_float32(rows: np.ndarray) -> None:
    found = quantize(rows, "int8")
    assert found.values.dtype == np.int8 and found.dtype == "int8" and found.offset is None
    for row, values, scale in zip(rows, found.values, found.scale, strict=True):  # type: ignore[arg-type]
        largest = max(abs(exact(x)) for x in row)
        assert exact(scale) == largest
        wanted = [round(single(single(exact(x) / largest) * 127)) if largest else 0 for x in row]
        assert values.tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_uint8_is_the_place_between_minimum_and_maximum(rows: np.ndarray) -> None:
    found = quantize(rows, "uint8")
    assert found.values.dtype == np.uint8 and found.dtype == "uint8"
    for row, values, scale, offset in zip(rows, found.values, found.scale, found.offset, strict=True):  # type: ignore[arg-type]
        low, high = min(map(exact, row)), max(map(exact, row))
        span = single(high - low)
        assert (exact(scale), exact(offset)) == (span, low)
        wanted = [round(single(single(single(exact(x) - low) / span) * 255)) if span else 0 for x in row]
        assert values.tolist() == wanted


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_binary_packs_signs_with_the_first_value_in_the_highest_bit(rows: np.ndarray) -> None:
    for dtype in ("binary", "ubinary"):
        found = quantize(rows, dtype)
        assert found.values.dtype == np.uint8 and found.dtype == "binary"
        assert found.values.shape == (len(rows), -(-rows.shape[1] // 8))
        for row, values in zip(rows, found.values, strict=True):
            bits = "".join("01"[bool(x > 0)] for x in row).ljust(8 * len(values), "0")
            assert bytes(values.tolist()) == int(bits, 2).to_bytes(len(values), "big")


def test_zero_is_not_positive_in_binary() -> None:
    assert quantize(np.array([[0.0, -0.0, 1e-45, -1e-45]], np.float32), "binary").values.tolist() == [
        [0b0010_0000]
    ]


def test_a_zero_row_stays_zero_and_a_constant_row_has_no_span() -> None:
    rows = np.array([[0, 0, 0], [0.3, 0.3, 0.3]], np.float32)
    signed, unsigned = quantize(rows, "int8"), quantize(rows, "uint8")
    assert signed.values.tolist() == [[0, 0, 0], [127, 127, 127]]
    assert unsigned.values.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert signed.scale is not None and signed.scale.tolist() == [0.0, np.float32(0.3)]
    assert unsigned.scale is not None and unsigned.scale.tolist() == [0.0, 0.0]


def test_halves_are_rounded_to_even() -> None:
    row = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    assert quantize(row, "int8").values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    row = np.array([[0, 1, 3, 5, 7, 510]], np.float32)
    assert quantize(row, "uint8").values.tolist() == [[0, 0, 2, 2, 4, 255]]


def test_rows_do_not_influence_each_other() -> None:
    rows = np.random.default_rng(3).standard_normal((20, 33)).astype(np.float32)
    for dtype in OUTPUT_DTYPES:
        whole = quantize(rows, dtype)
        for index in range(20):
            alone = quantize(rows[index : index + 1], dtype)
            assert np.array_equal(alone.values[0], whole.values[index])


def test_float32_is_passed_through_without_a_copy_and_float16_is_cast() -> None:
    rows = np.array([[1 / 3, 65504, 1e-8]], np.float32)
    assert quantize(rows, "float32").values is rows
    half = quantize(rows, "float16")
    assert half.values.dtype == np.float16 and half.dtype == "float16"
    assert half.values.tolist() == [[0.333251953125, 65504.0, 0.0]]


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
def test_read_only_rows_are_accepted_and_not_written(dtype: str) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    rows.flags.writeable = False
    quantize(rows, dtype)
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_shortened_unit_rows_have_unit_length_again() -> None:
    rows = np.random.default_rng(4).standard_normal((7, 32)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    short = shorten(rows, 5)
    assert short.dtype == np.float32 and short.shape == (7, 5)
    assert np.allclose(np.linalg.norm(short, axis=1), 1, atol=1e-6)
    assert np.allclose(np.cross(short[:, :3], rows[:, :3]), 0, atol=1e-6), (
        "the direction is that of the first values"
    )


def test_shortened_rows_of_another_length_are_only_cut() -> None:
    rows = np.array([[3.0, 4.0, 12.0]], np.float32)
    assert shorten(rows, 2).tolist() == [[3.0, 4.0]]


def test_a_row_that_is_zero_in_its_first_values_stays_zero() -> None:
    assert shorten(np.array([[0.0, 0.0, 1.0]], np.float32), 2).tolist() == [[0.0, 0.0]]


def test_the_full_width_is_the_row_itself() -> None:
    rows = np.eye(3, dtype=np.float32)
    assert shorten(rows, 3) is rows


def test_a_value_beyond_float16_is_an_error_and_no_infinity() -> None:
    with pytest.raises(InferenceFailed, match="float16"):
        quantize(np.array([[1.0, 70000.0]], np.float32), "float16")
