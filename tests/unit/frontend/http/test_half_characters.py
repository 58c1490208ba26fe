"""Texts of JSON bodies that are no Unicode: the field, the index, and what no such body is."""

from __future__ import annotations

import msgpack
import pytest

from frontend.http.fields import LARGEST_NBYTES, PIECE_NBYTES, UNCHECKED_NBYTES, fault_of, stray_byte


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rb'"\ud800"', r"body: \ud800 is half of a character, which a JSON body cannot hold"),
        (rb'{"a": ["x", {"b": "\ud83d\ude00\uDC00 "}]}', r"a[1].b: \udc00 is half"),
        (rb'{"a": "1", "a": "\udc00\ud800"}', r"a: \udc00 is half"),
        (rb'{"a\ud800": 1}', r"[key]: \ud800 is half"),
        (rb'{"a b": {"c": "\ud800"}}', r"[...].c: \ud800 is half"),
        (b'{"a": ["x", "\xed\xa0\x80"]}', "a[1]: byte 0xed of the body is not UTF-8"),
        (b"[" * 200 + rb'"\ud800"' + b"]" * 200, "...0][0]"),
        (rb'{"a": "\ud83d\ude00"}', ""),
        (rb'{"a": "\ud800"', ""),
        (rb'{"a": "\\ud800"}', ""),
        (b"[" * 100_000 + rb'"\ud800"', ""),
        (b"\xff", ""),
        (b"{", ""),
        (b'{"a": ["' + b"x" * LARGEST_NBYTES + rb'", "\ud800"]}', ""),
    ],
)
def test_the_first_half_is_named(body: bytes, said: str) -> None:
    found = fault_of(memoryview(body))
    assert found.startswith(said) and bool(found) == bool(said) and len(found) < 300


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"a": "1"}', ""),
        ('{"\N{TIGER}": "\u00fc"}'.encode(), ""),
        (b'{"a": 1, "\xff": 2}', "[key]: byte 0xff of the body is not UTF-8"),
        (b'{"a": {"b": ["\xc3"]}}', "a.b[0]: byte 0xc3"),
        (b'{"a": "' + b"x" * (PIECE_NBYTES - 8) + "\N{TIGER}".encode() + b'"}', ""),
        (b'{"a": "' + b"x" * LARGEST_NBYTES + b'\xff"}', "body: byte 0xff of the body is not UTF-8"),
        (b'{"a": "\xc3', "body: byte 0xc3"),
    ],
)
def test_a_byte_of_json_that_is_not_utf_8_is_named(body: bytes, said: str) -> None:
    for form in (body, memoryview(body)):
        found = stray_byte(form, binary=False)
        assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"a": "\u00fc", "b": b"\xff"}, False),
        ({"a": 1, b"\xff": [b"\xff"]}, False),
        ({"a": 1, "\udcff": 2}, True),
        ({"a": {"b": ["\udcff"]}}, True),
        ({"a": {(1, 2): 3}}, False),
        ({"a": "\u00fc" * 200, "b": "\U0001f405" * 40_000, "c": msgpack.ExtType(1, b"\xff" * 300)}, False),
        ({"a": "x" * 300 + "\udcff"}, True),
        ({"a": "x" * 3_000 + "\udcff"}, True),
        ({"a": "x" * PIECE_NBYTES + "\udcff"}, True),
        ({"a": [msgpack.ExtType(1, b"12"), 1.5, -7, 2**40, None, True, "\udcff"]}, True),
    ],
)
@pytest.mark.parametrize("beside", [0, UNCHECKED_NBYTES])
def test_a_byte_of_msgpack_that_is_not_utf_8_is_named_whatever_the_size_of_the_body(
    body: dict[object, object], is_refused: bool, beside: int
) -> None:
    packed = msgpack.packb({"data": bytes([0xA1, 0xFF]) * beside, **body}, unicode_errors="surrogateescape")
    for form in (packed, memoryview(packed)):
        found = stray_byte(form, binary=True)
        assert bool(found) == is_refused and ("0xff" in found or not is_refused)
