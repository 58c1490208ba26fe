"""Checks of fields that several protocols have, and looks into bodies that are not decoded.

1. Number and size of texts are held against the limits of the server.
2. Labels and output schema of an extract request are checked before anything is loaded.
3. Where a handler checks the words of a field by a constant, `one_of` tells the same constant in the schema.
4. Where the decoder checks the words, its message repeats the word that it got. `mismatch_of` cuts a long one, and adds
   the words that the field takes.

Before a body is decoded, and after its refusal:

1. `check_values` refuses a large body with too many values, and `without_long_values` leaves out images and texts.
2. `fault_of` finds the text of a JSON body that is no Unicode, `stray_byte` bytes that are not UTF-8 where a decoder
   does not look.
3. `model_in` finds the model that a refused body names.

`instant` writes the value of a field of answers that is a point in time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Meta, ValidationError, inspect

from ipc.errors import InvalidInput
from ipc.settings import Limits
from ipc.wire.codec import long_integer_in

UNCHECKED_NBYTES = 512 << 10
VALUES_PER_ITEM = 64
LONG_NBYTES = 4096
"""Strings and binaries over this size are no names of fields."""
PIECE_NBYTES = 256 << 10
_BACKSLASHES = re.compile(rb"\\*")

_MARKS = (b",", b"[", b"{")

# By first byte: bytes of a msgpack token without the payload that its length field announces, and that field's width
# (https://github.com/msgpack/msgpack/blob/master/spec.md).
_SIZES = [1] * 256
_WIDTHS = [0] * 256
_TEXTS = [head in (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB) for head in range(256)]
"""Whether a first byte begins a text in msgpack."""
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)
"""What stands for a byte that is not UTF-8 (PEP 383)."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_HOLDING = (str, list, dict)
LARGEST_NBYTES = 4 << 20
"""Bodies up to this size are searched; the search takes several times the memory of the body."""
LONGEST_LABEL = 500
"""Characters of one label."""
LARGEST_SCHEMA = 64 << 10
"""Bytes of an output schema as msgpack."""
_SHOWN = 200
_WRONG_WORD = "Invalid enum value"
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")
for _head in range(0xA0, 0xC0):
    _SIZES[_head] = 1 + (_head & 0x1F)
for _head, _size in (
    (0xCA, 5), (0xCB, 9), (0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9), (0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9),
    (0xD4, 3), (0xD5, 4), (0xD6, 6), (0xD7, 10), (0xD8, 18), (0xDC, 3), (0xDD, 5), (0xDE, 3), (0xDF, 5),
):  # fmt: skip
    _SIZES[_head] = _size
for _first, _extra in ((0xC4, 1), (0xC7, 2), (0xD9, 1)):
    for _power in range(3):
        _WIDTHS[_first + _power] = 1 << _power
        _SIZES[_first + _power] = (1 << _power) + _extra


def check_values(body: bytes, binary: bool, max_items: int) -> None:
    """Raise `InvalidInput` when a large body holds more than `VALUES_PER_ITEM` values for each of `max_items`.

    A decoded value takes about a hundred bytes and may be written in one or two: a body of empty maps takes fifty times
    its size once decoded. Bodies above `UNCHECKED_NBYTES` are therefore counted before anything is built.

    A large body is searched in pieces of `PIECE_NBYTES`: one step over the whole body would hold the interpreter lock,
    and so the event loop, even in another thread.
    """
    limit = VALUES_PER_ITEM * max_items
    if len(body) <= UNCHECKED_NBYTES:
        return
    if (_msgpack_values(body, limit) if binary else _json_values(body, limit)) > limit:
        raise InvalidInput(
            f"body: more than {limit} values, which is {VALUES_PER_ITEM} for each of limits.max_items"
        )


def has_more_values(text: bytes, limit: int) -> bool:
    """Whether JSON holds more than `limit` values; strings and keys count, what is inside of strings does not."""
    return _json_values(text, limit) > limit


def _json_values(body: bytes, limit: int) -> int:
    """Every value follows a comma or an opening bracket outside a string; those inside are left out when it matters."""
    body = without_long_values(body, binary=False)
    values = sum(count(body, mark) for mark in _MARKS)
    if values <= limit:
        return values
    values = quotes = 0
    for piece in _whole_escapes(body):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[quotes & 1 :: 2])
        values += sum(map(outside.count, _MARKS))
        quotes += len(parts) - 1
        # Each key and each value is one string at most, and the keys are no more than the values.
        if values > limit or quotes // 2 > 2 * limit:
            return limit + 1
    return values


def _whole_escapes(body: bytes) -> Iterator[bytes]:
    """`body` in pieces, none of which ends inside an escape sequence."""
    start = 0
    while start < len(body):
        end = start + PIECE_NBYTES
        if body[end - 1 : end] == b"\\":
            backslashes = _BACKSLASHES.match(body, end)
            end = backslashes.end() + 1 if backslashes else end + 1
        yield body[start:end]
        start = end


def count(body: bytes, mark: bytes, most: int | None = None) -> int:
    """How often `mark` occurs, in pieces; no further than `most` + 1 where that is all that matters."""
    marks, reach = 0, len(mark) - 1
    for start in range(0, len(body), PIECE_NBYTES):
        marks += body.count(mark, start, start + PIECE_NBYTES + reach)
        if most is not None and marks > most:
            break
    return marks


def _msgpack_values(body: bytes, limit: int) -> int:
    """Tokens one after another; containers need no look inside, since their elements simply follow. Keys count too."""
    at, end, sizes, widths = 0, len(body), _SIZES, _WIDTHS
    for count in range(limit + 1):
        if at >= end:
            return count
        head = body[at]
        width = widths[head]
        if width == 1:
            at += body[at + 1] if at + 1 < end else 0
        elif width:
            at += int.from_bytes(body[at + 1 : at + 1 + width], "big")
        at += sizes[head]
    return limit + 1


def without_long_values(body: bytes, binary: bool) -> bytes:
    """`body` without its strings and binaries over `LONG_NBYTES`, where those make up most of it; else `body` itself.

    What is left cannot be decoded, but holds every name of a field as it stands in the body.
    """
    if len(body) <= UNCHECKED_NBYTES:
        return body
    # More parts than this, and taking them out costs more than looking through them.
    most = len(body) // LONG_NBYTES
    parts = _msgpack_parts(body, most) if binary else _json_parts(body, most)
    return body if parts is None else b"".join(parts)


def _json_parts(body: bytes, most: int) -> list[bytes] | None:
    """Parts between strings that are long; None when there are more than `most` quotes.

    A string ends at a quote, perhaps an escaped one, so no name reaches over the end of what is taken out.
    """
    parts: list[bytes] = []
    start, at = 0, body.find(b'"')
    for _ in range(most):
        if at < 0:
            return [*parts, body[start:]]
        following = body.find(b'"', at + 1)
        if following - at > LONG_NBYTES:
            parts.append(body[start : at + 1])
            start = following
        at = following
    return None


def _msgpack_parts(body: bytes, most: int) -> list[bytes] | None:
    """Parts between payloads that are long; None when there are more than `most` tokens."""
    parts: list[bytes] = []
    start = at = 0
    for _ in range(most):
        if at >= len(body):
            return [*parts, body[start:]]
        head = body[at]
        size, width = _SIZES[head], _WIDTHS[head]
        payload = int.from_bytes(body[at + 1 : at + 1 + width], "big")
        if payload > LONG_NBYTES:
            parts.append(body[start : at + size])
            start = at + size + payload
        at += size + payload
    return None


def fault_of(body: bytes | memoryview) -> str:
    """JSON path and fault of the first text that is no Unicode: half of a surrogate pair, or bytes that are not UTF-8.

    Decoders refuse such a body at a byte. A client with thousands of texts needs the field and the index. Empty where
    there is no such text, or the body is no JSON or too long.
    """
    if len(body) > LARGEST_NBYTES:
        return ""
    raw = bytes(body)
    text = raw.decode(errors="surrogateescape")
    if not _ESCAPED.search(raw) and not _HALF.search(text):
        return ""
    try:
        found = _half_in(json.loads(text))
    except (ValueError, RecursionError):
        return ""
    if found is None:
        return ""
    path, half = found
    place = f"...{path[-_SHOWN:]}" if len(path) > _SHOWN else path.lstrip(".") or "body"
    if ord(half) in _BYTES:
        return f"{place}: byte 0x{ord(half) - 0xDC00:02x} of the body is not UTF-8"
    return f"{place}: \\u{ord(half):04x} is half of a character, which a JSON body cannot hold"


def stray_byte(body: bytes | memoryview, binary: bool) -> str:
    """Path and fault of a byte that is not UTF-8 in a body that a decoder has taken; empty for none.

    Decoders look at the texts that they keep, and pass over names and values of unknown fields.
    """
    try:
        if not binary:
            _require_utf8(body)
        elif len(body) > UNCHECKED_NBYTES:
            _require_utf8_texts(body)
        else:
            # PERF: builds all values of the body, and is faster than a look at each token as long as they are small.
            _ANY.decode(body)
    except UnicodeDecodeError as error:
        found = "" if binary else fault_of(body)
        return found or f"body: byte 0x{error.object[error.start]:02x} of the body is not UTF-8"
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        # What an unknown field of msgpack holds may be no value of Python, and is passed over.
        pass
    return ""


def _require_utf8(text: bytes | memoryview) -> None:
    """Raise `UnicodeDecodeError` for bytes that are not UTF-8. A long text is looked at in pieces."""
    if len(text) <= PIECE_NBYTES:
        str(text, "utf-8")
    elif not isinstance(text, bytes) or not text.isascii():
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(text), PIECE_NBYTES):
            decoder.decode(text[start : start + PIECE_NBYTES], start + PIECE_NBYTES >= len(text))


def _require_utf8_texts(body: bytes | memoryview) -> None:
    """Raise `UnicodeDecodeError` for a text of well-formed msgpack that is not UTF-8."""
    data, at, end = bytes(body), 0, len(body)
    texts, sizes, widths = _TEXTS, _SIZES, _WIDTHS
    while at < end:
        head = data[at]
        start = at + 1 + (width := widths[head])
        at += sizes[head]
        if width:
            at += data[start - 1] if width == 1 else int.from_bytes(data[start - width : start], "big")
        if texts[head]:
            # PERF: most texts are short, and plain.
            if at - start > PIECE_NBYTES:
                _require_utf8(memoryview(data)[start:at])
            elif not (text := data[start:at]).isascii():
                _require_utf8(text)


def _half_in(value: Any) -> tuple[str, str] | None:
    """(path, half) of the first text with one, in the order of the body.

    PERF: paths are made on the way back only, as bodies up to 512 KiB are searched on the event loop.
    """
    if type(value) is str:
        half = _HALF.search(value)
        return ("", half[0]) if half else None
    if type(value) is list:
        for at, entry in enumerate(value):
            if entry and type(entry) in _HOLDING and (inner := _half_in(entry)):
                return f"[{at}]{inner[0]}", inner[1]
    elif type(value) is dict:
        for name, entry in value.items():
            if half := _HALF.search(name):
                return "[key]", half[0]
            if entry and type(entry) in _HOLDING and (inner := _half_in(entry)):
                return f".{name}{inner[0]}" if _FIELD.fullmatch(name) else f"[...]{inner[0]}", inner[1]
    return None


class _Named(msgspec.Struct):
    """A body of which the name of the model alone is read."""

    model: Any = None


_ANY = msgspec.msgpack.Decoder()
_JSON = msgspec.json.Decoder(_Named)
_MSGPACK = msgspec.msgpack.Decoder(_Named)


def model_in(body: bytes, *, binary: bool = False) -> str:
    """The `model` of a body of JSON, or of msgpack if `binary`; empty where the body names none or cannot be read.

    Requests are counted by their model, also those with a mistake elsewhere.
    """
    try:
        name = (_MSGPACK if binary else _JSON).decode(body).model
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):
        return ""
    return name if isinstance(name, str) else ""


def check_texts(texts: Sequence[str], where: str, limits: Limits) -> None:
    """Raise `InvalidInput` that names the item for a text that is too long."""
    for index, text in enumerate(texts):
        if len(text) * 4 > limits.max_text_bytes:
            nbytes = len(text.encode())
            if nbytes > limits.max_text_bytes:
                place = where.format(index)
                raise InvalidInput(
                    f"{place}: {nbytes} bytes, the limit is {limits.max_text_bytes} (limits.max_text_bytes)"
                )


def check_shared(text: str, where: str, items: int, limits: Limits) -> None:
    """Raise `InvalidInput` for a text that is too long alone, or together with the items it stands before."""
    check_texts([text], where, limits)
    if items * len(text) > limits.max_body_bytes:
        raise InvalidInput(
            f"{where}: {len(text)} characters before {items} items, "
            f"the limit is {limits.max_body_bytes} in all (limits.max_body_bytes)"
        )


def check_count(count: int, where: str, limits: Limits) -> None:
    """Raise `InvalidInput` for no items or too many."""
    if count == 0:
        raise InvalidInput(f"{where}: may not be empty")
    if count > limits.max_items:
        raise InvalidInput(f"{where}: {count} given, the limit is {limits.max_items} (limits.max_items)")


def check_labels(labels: Sequence[str] | None, limits: Limits, field: str = "params.labels") -> list[str]:
    """The labels in the caller's order, each once. Raises `InvalidInput` for an unusable label of `field`."""
    given = list(labels or ())
    check_label_count(len(given), limits, field)
    for index, label in enumerate(given):
        where = f"{field}[{index}]"
        if not label.strip():
            raise InvalidInput(f"{where}: may not be empty")
        if len(label) > LONGEST_LABEL:
            raise InvalidInput(f"{where}: {len(label)} characters, the limit is {LONGEST_LABEL}")
    return distinct(given)


def distinct(labels: Sequence[str]) -> list[str]:
    """Each label once, where it stands first."""
    return list(dict.fromkeys(labels))


def check_label_count(count: int, limits: Limits, field: str) -> None:
    """Raise `InvalidInput` for more labels than a request may have."""
    if count > limits.max_labels:
        raise InvalidInput(f"{field}: {count} given, the limit is {limits.max_labels} (limits.max_labels)")


def check_schema(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """The output schema, whose content the model family checks. Raises `InvalidInput` if the schema is too large."""
    if schema is not None:
        try:
            nbytes = len(msgspec.msgpack.encode(schema))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            long = long_integer_in({"params": {"output_schema": schema}})
            said = (
                long
                or "params.output_schema: holds a value that JSON does not have, or values nested too deep"
            )
            raise InvalidInput(str(said)) from error
        if nbytes > LARGEST_SCHEMA:
            raise InvalidInput(f"params.output_schema: {nbytes} bytes, the limit is {LARGEST_SCHEMA}")
    return schema


def one_of(words: Iterable[str], description: str | None = None, *, required: bool = False) -> Meta:
    """What the schema of a text says: one of `words`, or null unless the text is `required`."""
    known = [*words] if required else [*words, None]
    return Meta(description=description, extra_json_schema={"enum": known})


def mismatch_of(error: ValidationError, kind: Any) -> str:
    """What the decoder of a `kind` says of a wrong type or an unknown word, with the JSON path of the value."""
    text = str(error)
    said, at, place = text.rpartition(" - at `")
    if len(text) > 2 * _SHOWN:
        said, place = f"{said[:_SHOWN]}...", place[-_SHOWN:]
    if said.startswith(_WRONG_WORD):
        words = _words_at(kind, tuple(_STEP.findall(place)))
        said += (
            f", expected {' or '.join(filter(None, (', '.join(words[:-1]), *words[-1:])))}" if words else ""
        )
    return f"{said}{at}{place}"


@lru_cache(maxsize=256)
def _words_at(kind: Any, steps: tuple[str, ...]) -> list[str]:
    """The words that a field takes. Each step is the name of a field, or empty for an entry of an array or a map."""
    types = list(_plain(inspect.type_info(kind)))
    for name in steps:
        types = [plain for one in types for inner in _inner(one, name) for plain in _plain(inner)]
    literals = [one.values for one in types if isinstance(one, inspect.LiteralType)]
    return [repr(word) for values in literals for word in values]


def _plain(found: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, without what is said about them."""
    if isinstance(found, inspect.Metadata):
        yield from _plain(found.type)
    elif isinstance(found, inspect.UnionType):
        for one in found.types:
            yield from _plain(one)
    else:
        yield found


def _inner(found: inspect.Type, name: str) -> Iterator[inspect.Type]:
    if name and isinstance(found, inspect.StructType):
        yield from (field.type for field in found.fields if field.encode_name == name)
    elif not name and isinstance(found, inspect.ListType | inspect.VarTupleType):
        yield found.item_type
    elif not name and isinstance(found, inspect.DictType):
        yield found.value_type


def instant(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
