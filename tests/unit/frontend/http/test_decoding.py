"""Bodies to structs: every failure is `InvalidInput`, repeated keys are found, and large bodies are counted first."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.http.fields import UNCHECKED_NBYTES, VALUES_PER_ITEM, check_values
from frontend.protocols.sie.schemas import EncodeRequest, Key, decode, read, refuse_repeated
from ipc.errors import InvalidInput
from ipc.settings import Limits

LIMITS = Limits()


class Inner(msgspec.Struct):
    """A nested object."""

    number: int | None = None
    text: str | None = None


class Outer(msgspec.Struct):
    """An object of every kind of field."""

    name: str
    inner: list[Inner] | None = None
    free: dict[str, Any] | None = None


def test_good_bodies_are_decoded_in_both_forms() -> None:
    value = {"name": "a", "inner": [{"number": 1}], "free": {"x": [1, None]}, "unknown": {"y": 2}}
    for body, binary in ((json.dumps(value).encode(), False), (msgpack.packb(value), True)):
        found = decode(body, Outer, binary=binary)
        assert found == Outer("a", [Inner(1)], {"x": [1, None]})


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_decoded_or_refused(body: bytes, binary: bool) -> None:
    try:
        assert isinstance(decode(body, Outer, binary=binary), Outer)
    except InvalidInput as error:
        assert error.message.startswith("body: ")
        assert len(error.message) < 500


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["items", "params", "x"]), VALUES, max_size=3), st.booleans())
def test_any_well_formed_body_is_an_encode_request_or_refused(value: dict[str, Any], binary: bool) -> None:
    body = msgpack.packb(value) if binary else json.dumps(value, allow_nan=True).encode()
    form = "application/msgpack" if binary else "application/json"
    try:
        assert isinstance(read(body, form, EncodeRequest, LIMITS), EncodeRequest)
    except InvalidInput as error:
        assert error.message


@settings(max_examples=100, deadline=None)
@given(VALUES, st.sampled_from([b"items", b"text", b"params"]), st.integers(0, 200), st.binary(max_size=4))
def test_a_damaged_good_body_is_decoded_or_refused(value: Any, name: bytes, at: int, damage: bytes) -> None:
    good = msgpack.packb(
        {"items": [{"text": "a", "metadata": {"k": value}}], "params": {"options": {"o": value}}}
    )
    body = good[:at] + damage + good[at + len(damage) :]
    for candidate in (body, body.replace(name, name[::-1])):
        try:
            read(candidate, "application/msgpack", EncodeRequest, LIMITS)
        except InvalidInput:
            pass


KEYS = tuple(map(Key, ("name", "free")))
REPEATED = {
    "json": (b'{"name":"a","name":"b"}', False),
    "json with spaces": (b'{ "name" : "a" , "name" : "b" }', False),
    "json escaped": (b'{"name":"a","n\\u0061me":"b"}', False),
    "json nested": (b'{"name":"a","free":{"name":1,"name":2}}', False),
    "fixstr": (b"\x82\xa4name\xa1a\xa4name\xa1b", True),
    "str 8": (b"\x82\xa4name\xa1a\xd9\x04name\xa1b", True),
    "str 16": (b"\x82\xda\x00\x04name\xa1a\xa4name\xa1b", True),
    "str 32": (b"\x82\xdb\x00\x00\x00\x04name\xa1a\xa4name\xa1b", True),
}


@pytest.mark.parametrize("form", REPEATED)
def test_a_repeated_key_is_found_however_it_is_written(form: str) -> None:
    body, binary = REPEATED[form]
    with pytest.raises(InvalidInput, match=r"'name' occurs twice"):
        refuse_repeated(body, KEYS, binary=binary)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("letter", "abcdefghijklmnopqrstuvwxyz_")
def test_a_repeated_key_is_found_whichever_letter_is_escaped(letter: str, upper: bool) -> None:
    code = f"{ord(letter):04X}" if upper else f"{ord(letter):04x}"
    body = b'{"x%s":1,"x\\u%s":2}' % (letter.encode(), code.encode())
    with pytest.raises(InvalidInput, match="occurs twice"):
        refuse_repeated(body, (Key(f"x{letter}"),), binary=False)


def test_escapes_that_ordinary_writers_use_cost_no_second_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: bytes, binary: bool) -> None:
        raise AssertionError("decoded a second time")

    monkeypatch.setattr("frontend.protocols.sie.schemas._refuse_duplicates", refuse)
    for char in "\"\\/<>&'+=`\x7f\x1f\n\u00e9\u2028":
        escaped = b"\\u%04x" % ord(char)
        refuse_repeated(b'{"name":"a %s b"}' % escaped, KEYS, binary=False)
        refuse_repeated(b'{"name":"a %s b"}' % escaped.upper().replace(b"U", b"u"), KEYS, binary=False)


@pytest.mark.parametrize(
    ("body", "binary"),
    [
        (b'{"name":"name \\"name\\" name","free":{"name":1}}', False),
        (b'{"name":"caf\\u00e9 \\u0041"}', False),
        (
            json.dumps(
                {"name": '{"name": 1, "name": 2}', "free": {"a": {"name": 1}, "b": {"name": 2}}}
            ).encode(),
            False,
        ),
        (msgpack.packb({"name": "\xa4name\xa4name", "free": {"a": {"name": "name"}, b"\xa4name": 1}}), True),
        (
            msgpack.packb(
                {"name": b"\xa4name\xa4name", "time": msgpack.Timestamp(1), "free": msgpack.ExtType(5, b"")}
            ),
            True,
        ),
    ],
)
def test_names_that_occur_elsewhere_are_no_repetition(body: bytes, binary: bool) -> None:
    refuse_repeated(body, KEYS, binary=binary)


def test_a_key_of_many_objects_may_occur_once_in_each() -> None:
    body = b'{"inner":[{"text":"a"},{"text":"b"}]}'
    refuse_repeated(body, (), ((Key("text"), 2),), binary=False)
    with pytest.raises(InvalidInput, match="'text'"):
        refuse_repeated(body.replace(b'"a"', b'"a","text":"c"'), (), ((Key("text"), 2),), binary=False)


def padded(values: int, form: str) -> bytes:
    """A body of more than the unchecked size with `values` values, one long string among them."""
    filler = "x, [{" * (UNCHECKED_NBYTES // 5 + 1)
    value = [filler, *([0] * (values - 2))]
    return json.dumps(value).encode() if form == "json" else msgpack.packb(value)


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_large_body_may_hold_the_allowed_number_of_values(form: str) -> None:
    limit = 100 * VALUES_PER_ITEM
    check_values(padded(limit, form), form == "msgpack", 100)
    with pytest.raises(InvalidInput, match=f"more than {limit} values"):
        check_values(padded(limit + 2, form), form == "msgpack", 100)


def test_a_small_body_is_not_counted() -> None:
    check_values(b"[" + b"0," * (UNCHECKED_NBYTES // 2 - 2) + b"0]", False, 1)


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "value",
    [
        b"", "text" * 20, b"\x80" * 70_000, b"\x90" * 300, "x" * 70_000, "\x91" * 20, 1, -1, 200, 70_000, 2**40, -200,
        -70_000, -(2**40), 1.5, None, True, msgpack.ExtType(1, b"a"), msgpack.ExtType(1, b"ab"),
        msgpack.ExtType(1, b"abc"), msgpack.ExtType(1, b"abcd"), msgpack.ExtType(1, b"a" * 8),
        msgpack.ExtType(1, b"a" * 16), msgpack.ExtType(1, b"a" * 300), msgpack.ExtType(1, b"\x90" * 70_000),
        msgpack.Timestamp(1), [1] * 20, [1] * 70_000, {str(n): n for n in range(20)},
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:12]}",
)  # fmt: skip
def test_every_msgpack_form_is_counted_as_one_value_and_its_elements(value: Any) -> None:
    elements = len(value) * (1 + isinstance(value, dict)) if isinstance(value, list | dict) else 0
    repeats = max(4, UNCHECKED_NBYTES // max(1, len(msgpack.packb(value))) + 1)
    body, total = msgpack.packb([value] * repeats), 1 + repeats * (1 + elements)
    # The limit is in steps of values per item; the count must lie between the two that enclose it.
    items = -(-total // VALUES_PER_ITEM)
    check_values(body, True, items)
    with pytest.raises(InvalidInput):
        check_values(body, True, items - 1)
