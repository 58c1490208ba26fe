"""A message as it came: bytes, of which a message is made when it is first asked for.

That is after the caller was let in, so that what a stranger sends is never parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from frontend.grpc import wire
from ipc.errors import InvalidInput

SPLIT_NBYTES = 2 * wire.MAX_FIELDS
"""PERF: up to this size, which holds no more fields than are allowed, the library's parser is faster than `split`."""


class Form:
    """How the requests of one method are read; `raw_field` is the number of their large bytes field (0: none).

    `check` is given what is left of a large message without that field, before anything is made of it.
    """

    def __init__(
        self, request: type[Message], raw_field: int, check: Callable[[bytes], None] | None = None
    ) -> None:
        self.request, self.raw_field, self.check = request, raw_field, check
        described = request.DESCRIPTOR
        self.raw_name = described.fields_by_number[raw_field].name if raw_field else ""
        self.messages = frozenset(
            field.number for field in described.fields if field.type == FieldDescriptor.TYPE_MESSAGE
        )

    def receive(self, data: bytes) -> Received:
        """One message."""
        return Received(self, data)


class Received:
    """One message; `raw` are the values of the form's large field, once it was parsed."""

    __slots__ = ("_data", "_error", "_form", "_message", "nbytes", "raw")

    def __init__(self, form: Form, data: bytes) -> None:
        self._form, self._data, self.nbytes = form, data, len(data)
        self._message: Message | None = None
        self._error: InvalidInput | None = None
        self.raw: Sequence[Any] = ()

    def message(self) -> Message:
        """The message. Raises `InvalidInput` for what is none of this method, or has too many fields."""
        if self._error is None and self._message is None:
            try:
                self._message = self._parsed()
            except (DecodeError, ValueError):
                self._error = InvalidInput("the request is not a message of this method")
            except InvalidInput as error:
                self._error = error
            self._data = b""
        if self._error is not None:
            raise self._error
        assert self._message is not None
        return self._message

    def _parsed(self) -> Message:
        form, data = self._form, self._data
        if form.raw_field and len(data) > SPLIT_NBYTES:
            rest, self.raw = wire.split(data, form.raw_field, form.messages)
            if form.check is not None:
                form.check(rest)
            return form.request.FromString(rest)
        message = form.request.FromString(data)
        if form.raw_field:
            self.raw = list(getattr(message, form.raw_name))
        return message
