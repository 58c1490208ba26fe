"""A message as received: bytes, which are parsed when the message is first asked for.

Parsing happens after the caller was let in, so no large message of a stranger is parsed. A field of two bytes can
become an object of eighty, so the fields of a message are counted before parsing: of a large message at any depth, by
its descriptor (`Outline`), where each byte of a packed field counts too, since it may become a number in a list.

Messages with large byte fields are taken apart (`split`) and put together (`parts`) without copies of those fields.

The protobuf library copies a bytes field when it parses, again when it is read, and twice more on the way out. Here a
message is split into what is left for the library and views of the received bytes, and joined once from its parts.
A field of two bytes can become a message of eighty. So a message with more than `MAX_FIELDS` fields, at its top and one
level below, is refused before the library parses the message.
Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

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
    view, field_tag = memoryview(data), field << 3 | _BYTES
    nested = {number << 3 | _BYTES for number in messages}
    rest: list[memoryview] = []
    contents: list[memoryview] = []
    copied = count = 0
    for tag, began, content, end in fields(data, 0, len(data)):
        count = _counted(count)
        if tag == field_tag:
            if copied < began:
                rest.append(view[copied:began])
            contents.append(view[content:end])
            copied = end
        elif tag in nested:
            for _ in fields(data, content, end):
                count = _counted(count)
    rest.append(view[copied:])
    return b"".join(rest), contents


def parts(head: bytes, field: int, contents: Sequence[Buffer]) -> list[Buffer]:
    """The message `head` with one bytes field numbered `field` for each of `contents`."""
    buffers: list[Buffer] = [head]
    for content in contents:
        buffers += (prefix(field, len(content)), content)
    return buffers


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


@dataclass(slots=True)
class Outline:
    """The fields of a message to look into, by their tags: inner messages, and fields that may be packed."""

    messages: dict[int, Outline] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, described: Any, known: dict[str, Outline] | None = None) -> Outline:
        """The outline of a descriptor's message and of all below; `known` holds finished outlines by name."""
        known = {} if known is None else known
        if described.full_name in known:
            return known[described.full_name]
        outline = known[described.full_name] = cls()
        for one in described.fields:
            tag = one.number << 3 | _BYTES
            if one.type == FieldDescriptor.TYPE_MESSAGE:
                outline.messages[tag] = cls.of(one.message_type, known)
            elif one.is_repeated and one.type not in (
                FieldDescriptor.TYPE_STRING,
                FieldDescriptor.TYPE_BYTES,
            ):
                outline.packed.add(tag)
        return outline

    def refuse_too_many_fields(self, data: bytes) -> None:
        """Raise `InvalidInput` for more than `MAX_FIELDS` fields, `ValueError` for other bytes."""
        count, left = 0, [(self, 0, len(data))]
        while left:
            outline, at, end = left.pop()
            for tag, _, content, stop in fields(data, at, end):
                count += 1 + (stop - content if tag in outline.packed else 0)
                if count > MAX_FIELDS:
                    raise InvalidInput(TOO_MANY)
                if tag in outline.messages:
                    left.append((outline.messages[tag], content, stop))


SPLIT_NBYTES = 2 * MAX_FIELDS
"""PERF: up to this size, which holds no more fields than are allowed, the library's parser is faster than `split`."""


class Form:
    """How the requests of one method are read; `raw_field` is the number of their large bytes field (0: none).

    `check` gets a large message without that field, before the message is parsed; without `check` all
    its fields are counted, at any depth.
    """

    def __init__(
        self, request: type[Message], raw_field: int, check: Callable[[bytes], None] | None = None
    ) -> None:
        described = request.DESCRIPTOR
        self.request, self.raw_field = request, raw_field
        self.check = Outline.of(request.DESCRIPTOR).refuse_too_many_fields if check is None else check
        self.raw_name = described.fields_by_number[raw_field].name if raw_field else ""
        self.messages = frozenset(
            field.number for field in described.fields if field.type == FieldDescriptor.TYPE_MESSAGE
        )

    def receive(self, data: bytes) -> Received:
        """The bytes of one message, which nobody has parsed."""
        return Received(self, data)


class Received:
    """A message; `raw` are the values of the form's large field, after the parse."""

    __slots__ = ("_data", "_form", "_message", "_wrong", "nbytes", "raw")

    def __init__(self, form: Form, data: bytes) -> None:
        self._form, self._data, self.nbytes = form, data, len(data)
        self._message: Message | None = None
        self._wrong = ""
        self.raw: Sequence[Any] = ()

    @property
    def data(self) -> bytes:
        """The bytes, until they are parsed."""
        return self._data

    def message(self) -> Message:
        """The message. Raises `InvalidInput` for bytes that are no message of this method, or have too many fields."""
        if not self._wrong and self._message is None:
            try:
                self._message = self._parsed()
            except (DecodeError, ValueError):
                self.forget("the request is not a message of this method")
            except InvalidInput as error:
                self.forget(error.message)
            self._data = b""
        if self._wrong:
            raise InvalidInput(self._wrong)
        assert self._message is not None
        return self._message

    def forget(self, why: str = "the request has been answered") -> None:
        """Let go of all that was received; from now on `message` raises an error that says `why`."""
        self._data, self._message, self.raw, self._wrong = b"", None, (), why

    def _parsed(self) -> Message:
        form, data = self._form, self._data
        if len(data) > SPLIT_NBYTES:
            raw: Sequence[Any] = ()
            if form.raw_field:
                data, raw = split(data, form.raw_field, form.messages)
            form.check(data)
            message = form.request.FromString(data)
            self.raw = raw
            return message
        message = form.request.FromString(data)
        if form.raw_field:
            self.raw = list(getattr(message, form.raw_name))
        return message
