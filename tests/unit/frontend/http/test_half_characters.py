"""Texts of JSON bodies that are no Unicode: the field, the index, and what no such body is."""

from __future__ import annotations

import pytest

from frontend.http.fields import LARGEST_NBYTES, fault_of


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
