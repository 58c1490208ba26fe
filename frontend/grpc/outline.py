"""Counts the fields of a message at any depth, by its descriptor, before the protobuf library makes anything of them.

Each byte of a packed field counts too, since it may become a number in a list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from frontend.grpc import wire
from ipc.errors import InvalidInput

_BYTES = 2


@dataclass(slots=True)
class Outline:
    """What of a message is looked into: by their tags, the messages in it, and the fields that may be packed."""

    messages: dict[int, Outline] = field(default_factory=dict)
    packed: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, described: Any, known: dict[str, Outline] | None = None) -> Outline:
        """That of a descriptor's message and of all below it; those in `known` are made already, by name."""
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

    def check(self, data: bytes) -> None:
        """Raise `InvalidInput` for more than `wire.MAX_FIELDS` fields, `ValueError` for what is no such message."""
        count, left = 0, [(self, 0, len(data))]
        while left:
            outline, at, end = left.pop()
            for tag, _, content, stop in wire.fields(data, at, end):
                count += 1 + (stop - content if tag in outline.packed else 0)
                if count > wire.MAX_FIELDS:
                    raise InvalidInput(wire.TOO_MANY)
                if tag in outline.messages:
                    left.append((outline.messages[tag], content, stop))
