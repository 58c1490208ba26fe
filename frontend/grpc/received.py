"""A message as received: bytes, which are parsed when the message is first asked for.

Parsing happens after the caller was let in, so no large message of a stranger is parsed. A field of two bytes can
become an object of eighty, so the fields of a message are counted before parsing: of a large message at any depth, by
its descriptor (`Outline`), where each byte of a packed field counts too, since it may become a number in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from frontend.grpc import wire
from ipc.errors import InvalidInput

_BYTES = 2


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
        made = known[described.full_name] = cls()
        for one in described.fields:
            tag = one.number << 3 | _BYTES
            if one.type == FieldDescriptor.TYPE_MESSAGE:
                made.messages[tag] = cls.of(one.message_type, known)
            elif one.is_repeated and one.type not in (
                FieldDescriptor.TYPE_STRING,
                FieldDescriptor.TYPE_BYTES,
            ):
                made.packed.add(tag)
        return made

    def refuse_too_many_fields(self, data: bytes) -> None:
        """Raise `InvalidInput` for more than `wire.MAX_FIELDS` fields, `ValueError` for other bytes."""
        count, left = 0, [(self, 0, len(data))]
        while left:
            outline, at, end = left.pop()
            for tag, _, content, stop in wire.fields(data, at, end):
                count += 1 + (stop - content if tag in outline.packed else 0)
                if count > wire.MAX_FIELDS:
                    raise InvalidInput(wire.TOO_MANY)
                if tag in outline.messages:
                    left.append((outline.messages[tag], content, stop))


SPLIT_NBYTES = 2 * wire.MAX_FIELDS
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
        """One message."""
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
                data, raw = wire.split(data, form.raw_field, form.messages)
            form.check(data)
            message = form.request.FromString(data)
            self.raw = raw
            return message
        message = form.request.FromString(data)
        if form.raw_field:
            self.raw = list(getattr(message, form.raw_name))
        return message
