"""JSON `data` of KServe v2 tensors: every datatype at its limits, nesting, and what is refused with which words."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from frontend.protocols.kserve_v2 import elements
from frontend.tensors.uploading import HEAD_GROWTH
from ipc.errors import InvalidInput
from ipc.memory.datatypes import DATATYPES

INTEGERS = [name for name in DATATYPES if "INT" in name]
BITS = {name: int(name.removeprefix("U").removeprefix("INT")) for name in INTEGERS}


def bounds(datatype: str) -> tuple[int, int]:
    """The range of an integer datatype, from its name alone."""
    bits = BITS[datatype]
    return (0, 2**bits - 1) if datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def read(value: object, datatype: str, count: int) -> bytes:
    return bytes(elements.read(json.dumps(value).encode(), datatype, count, "input 'x'"))


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_keep_both_ends_of_their_range(datatype: str) -> None:
    low, high = bounds(datatype)
    values = [low, high, 0, 1, high - 1]
    code = {8: "b", 16: "h", 32: "i", 64: "q"}[BITS[datatype]]
    expected = struct.pack(f"<5{code.upper() if low == 0 else code}", *values)
    assert read(values, datatype, 5) == expected


@pytest.mark.parametrize("datatype", INTEGERS)
@pytest.mark.parametrize("beyond", [-1, 1])
def test_an_integer_beyond_its_range_is_refused_with_element_and_range(datatype: str, beyond: int) -> None:
    low, high = bounds(datatype)
    value = low - 1 if beyond < 0 else high + 1
    with pytest.raises(InvalidInput, match=rf"element 1: {value} is out of range for {datatype}"):
        read([0, value], datatype, 2)


@pytest.mark.parametrize("text", [b"[-0]", b"[[-0]]"])
def test_minus_zero_is_a_zero_of_unsigned_types(text: bytes) -> None:
    assert bytes(elements.read(text, "UINT8", 1, "x")) == b"\0"


@pytest.mark.parametrize(
    ("text", "datatype", "words"),
    [
        (b"[1.5]", "INT32", "element 0: expected an integer for INT32, got 1.5"),
        (b"[1e3]", "INT64", "expected an integer for INT64, got 1e3"),
        (b"[1.0]", "UINT64", "expected an integer for UINT64, got 1.0"),
        (b"[9007199254740993.0]", "INT64", "expected an integer for INT64, got 9007199254740993.0"),
        (b"[1, null]", "INT32", "element 1: expected a number for INT32, got null"),
        (b'["1"]', "FP32", "expected a number for FP32, got a string"),
        (b"[true]", "UINT8", "expected a number for UINT8, got true"),
        (b"[0, 1]", "BOOL", "element 0: expected true or false for BOOL, got an integer"),
        (b"[null]", "BOOL", "got null"),
        (b"[{}]", "FP64", "got an object"),
        (b"[3]", "BYTES", "element 0: expected a string or an object with 'b64' for BYTES, got an integer"),
        (b'[{"b64": "?"}]', "BYTES", "not valid base64"),
        (b'[{"b64": "YQ==", "more": 1}]', "BYTES", "got an object"),
        (b"[1e39]", "FP32", "out of range for FP32"),
        (b"[65520]", "FP16", "out of range for FP16"),
        (b"[3.4e38]", "BF16", "out of range for BF16"),
        (b"[1e400]", "FP64", "1e400 is out of range for FP64"),
        (b"[1" + b"0" * 400 + b"]", "FP64", "out of range for FP64"),
    ],
)
def test_an_element_of_another_type_is_named(text: bytes, datatype: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        elements.read(text, datatype, 2 if b"," in text else 1, "input 'x'")


def test_reals_are_rounded_as_torch_rounds_them() -> None:
    values = [0.1, -1 / 3, 65504.0, 1e-8, 3, 1.0009765625 + 2**-12, 1.00390625, 1.01171875, 0.0, -0.0]
    for datatype, kind in (("FP16", torch.float16), ("BF16", torch.bfloat16), ("FP32", torch.float32)):
        expected = torch.tensor(values, dtype=torch.float32).to(kind)
        raw = expected.view(torch.int32 if datatype == "FP32" else torch.int16).numpy().tobytes()
        assert read(values, datatype, len(values)) == raw
    assert read(values, "FP64", len(values)) == struct.pack(f"<{len(values)}d", *values)


@pytest.mark.parametrize("datatype", ["FP64", "INT64", "UINT8"])
def test_large_lists_are_read_as_by_a_json_parser(datatype: str) -> None:
    rng = random.Random(7)
    make = {
        "FP64": lambda: rng.choice(
            [rng.random(), rng.gauss(0, 1e12), rng.random() * 10.0 ** rng.randint(-300, 300)]
        ),
        "INT64": lambda: rng.randint(-(2**63), 2**63 - 1),
        "UINT8": lambda: rng.randint(0, 255),
    }[datatype]
    values = [[make() for _ in range(7)] for _ in range(6000)]
    flat = [value for row in values for value in row]
    expected = np.array(flat, DATATYPES[datatype].array).tobytes()
    for text in (json.dumps(values, indent=1).encode(), orjson.dumps(flat)):
        assert bytes(elements.read(text, datatype, len(flat), "x")) == expected


@pytest.mark.parametrize(
    "text", [b"[1,2,3]", b"[[1],[2,3]]", b"[[],[1,[2]],[[[3]]],[]]", b" [ [1 , 2] ,\n[ 3 ] ] "]
)
def test_nesting_need_not_match_the_shape(text: bytes) -> None:
    assert bytes(elements.read(text, "INT8", 3, "x")) == b"\1\2\3"
    words = text.replace(b"1", b'"a[,"').replace(b"2", b'"]"').replace(b"3", b'""')
    expected = b"\3\0\0\0a[," + b"\1\0\0\0]" + b"\0\0\0\0"
    assert bytes(elements.read(words, "BYTES", 3, "x")) == expected


@pytest.mark.parametrize("count", [1, 2, 1000])
@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("FP16", "BF16")])
def test_elements_take_no_more_than_the_room_that_is_kept_for_them(datatype: str, count: int) -> None:
    shortest: Any = {"BYTES": "", "BOOL": True}.get(datatype, 1)
    text = json.dumps([shortest] * count, separators=(",", ":")).encode()
    assert len(elements.read(text, datatype, count, "x")) <= HEAD_GROWTH * len(text)


def test_truth_values_and_strings() -> None:
    assert read([[True], [False, True]], "BOOL", 3) == b"\1\0\1"
    assert read(["é", {"b64": "AP8="}], "BYTES", 2) == b"\2\0\0\0\xc3\xa9\2\0\0\0\0\xff"
    assert read([], "BOOL", 0) == read([], "FP32", 0) == read([[]], "BYTES", 0) == b""


@pytest.mark.parametrize("datatype", ["INT32", "BOOL", "BYTES"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_elements_is_refused_with_both_numbers(datatype: str, count: int) -> None:
    value = {"INT32": 1, "BOOL": True, "BYTES": "a"}[datatype]
    with pytest.raises(InvalidInput, match=f"input 'x': expected {count} elements, got 2"):
        read([value, value], datatype, count)


@pytest.mark.parametrize(("datatype", "leaf"), [("INT32", b"1"), ("BOOL", b"true"), ("BYTES", b'"a"')])
def test_a_hundred_levels_are_read_and_one_more_is_refused(datatype: str, leaf: bytes) -> None:
    elements.read(b"[" * 100 + leaf + b"]" * 100, datatype, 1, "x")
    with pytest.raises(InvalidInput, match="nested deeper than 100 levels"):
        elements.read(b"[" * 101 + leaf + b"]" * 101, datatype, 1, "x")


def test_many_brackets_side_by_side_are_not_deep() -> None:
    text = b"[" + b",".join([b"[1]"] * 500) + b"]"
    assert bytes(elements.read(text, "UINT8", 500, "x")) == b"\1" * 500


@pytest.mark.parametrize("text", [b"[" + b'"a",' * 99 + b'""]', b"[" + b"[]," * 99 + b"[]]"])
def test_objects_of_json_are_bounded(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "MOST_OBJECTS", 90)
    with pytest.raises(InvalidInput, match="more than 90 elements"):
        elements.read(text, "BYTES", 100, "x")


def test_a_mistake_in_a_long_text_is_told_without_building_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_loaded", lambda *_: pytest.fail("it was built"))
    text = b"[" + b"1," * (1 << 20) + b"null]"
    with pytest.raises(InvalidInput, match="input 'x': an element is no INT32"):
        elements.read(text, "INT32", 5, "input 'x'")


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT64", "BOOL"])
def test_a_comma_in_a_string_longer_than_a_piece_is_no_border_between_elements(datatype: str) -> None:
    text = json.dumps(["a" * elements.PIECE_NBYTES + ",1"]).encode()
    with pytest.raises(InvalidInput, match="element 0: expected"):
        elements.read(text, datatype, 1, "x")
