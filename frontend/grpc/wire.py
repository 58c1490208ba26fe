"""Protobuf messages with large byte fields, taken apart and put together without copies of those fields.

The protobuf library copies a bytes field when it parses, again when it is read, and twice more on the way out. Here a
message is split into what is left for the library and views of the received bytes, and joined once from its parts.
A field of two bytes can become a message of eighty, so a message has at most `MAX_FIELDS` of them, at its top and one
level below, before anything is made of it.
Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

from ipc.errors import InvalidInput

Buffer = bytes | memoryview

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_NBYTES = 10
MAX_FIELDS = 8192
"""Fields of one message and of those below it that are counted with it; inputs and outputs have a few each."""
TOO_MANY = f"the request has more than {MAX_FIELDS} fields, which is the limit of a message"


def split(data: bytes, field: int, messages: Collection[int] = ()) -> tuple[bytes, list[memoryview]]:
    """`data` without its bytes fields numbered `field`, and these fields as views.

    `messages` are the numbers of the fields that are messages, whose own fields are counted too.

    Raises:
        ValueError: `data` is no message.
        InvalidInput: it has more than `MAX_FIELDS` fields.
    """
    view, wanted = memoryview(data), field << 3 | _BYTES
    nested = {number << 3 | _BYTES for number in messages}
    rest: list[memoryview] = []
    found: list[memoryview] = []
    kept = count = 0
    for tag, began, content, end in fields(data, 0, len(data)):
        count = _counted(count)
        if tag == wanted:
            if kept < began:
                rest.append(view[kept:began])
            found.append(view[content:end])
            kept = end
        elif tag in nested:
            for _ in fields(data, content, end):
                count = _counted(count)
    rest.append(view[kept:])
    return b"".join(rest), found


def parts(head: bytes, field: int, contents: Sequence[Buffer]) -> list[Buffer]:
    """The message `head` with one bytes field numbered `field` for each of `contents`."""
    found: list[Buffer] = [head]
    for content in contents:
        found += (prefix(field, len(content)), content)
    return found


def nested(field: int, inner: list[Buffer]) -> list[Buffer]:
    """A message whose only field, numbered `field`, is the message of the parts `inner`."""
    return [prefix(field, sum(map(len, inner))), *inner]


@lru_cache(maxsize=1024)
def prefix(field: int, nbytes: int) -> bytes:
    """What stands before the content of a bytes field."""
    return _encoded(field << 3 | _BYTES) + _encoded(nbytes)


def _encoded(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _counted(count: int) -> int:
    """The count after another field. Raises `InvalidInput` above the limit."""
    if count == MAX_FIELDS:
        raise InvalidInput(TOO_MANY)
    return count + 1


def fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Tag, beginning, beginning of the content and end of each field of the message from `at` to `end`.

    Raises `ValueError` where it is no message.
    """
    while at < end:
        began = at
        tag, at = _varint(data, at)
        at, content = _skip(data, at, tag & 7)
        if at > end:
            raise ValueError("a field is cut short")
        yield tag, began, content, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and the place after it."""
    number = shift = 0
    for place in range(at, min(at + _MAX_VARINT_NBYTES, len(data))):
        byte = data[place]
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place + 1
        shift += 7
    raise ValueError("a number is cut short or too long")


def _skip(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """The place after a field's value, and where its content begins."""
    if kind == _BYTES:
        nbytes, content = _varint(data, at)
        return content + nbytes, content
    if kind == _VARINT:
        return _varint(data, at)[1], at
    if kind in (_FIXED64, _FIXED32):
        return at + (8 if kind == _FIXED64 else 4), at
    raise ValueError(f"wire type {kind} is not in use")
