"""Every message of TRTIS v1 comes back whole from the wire format, from text on one or many lines, and from JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from google.protobuf import json_format, message_factory, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from frontend.protocols.trtis_v1.requests import many_lines, one_line
from ipc.protos import trtis_v1_pb2 as pb

_BY_KIND: dict[int, tuple[Any, Any]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 7),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (2**32 - 1, 1),
    FieldDescriptor.CPPTYPE_UINT64: (2**64 - 1, 1),
    FieldDescriptor.CPPTYPE_FLOAT: (0.1, -1e-30),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.1, -1e-300),
    FieldDescriptor.CPPTYPE_BOOL: (True, True),
}
_STRINGS = ("モデル\n\"'\\", "\x00\x7f #")


def messages(within: Iterable[Descriptor]) -> Iterator[Descriptor]:
    """Messages and those inside them, at every depth."""
    for message in within:
        if not message.GetOptions().map_entry:
            yield message
            yield from messages(message.nested_types)


ALL = {
    message.full_name.removeprefix("nvidia.inferenceserver."): message
    for message in messages(pb.DESCRIPTOR.message_types_by_name.values())
}


def values_of(field: FieldDescriptor) -> tuple[Any, Any]:
    """Two values of a field that are not its default."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return filled(field.message_type), filled(field.message_type)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        last = field.enum_type.values[-1].number
        return last, last
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes(range(256)), b"\0"
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _STRINGS
    return _BY_KIND[field.cpp_type]


def filled(kind: Descriptor, choice: int = 0) -> Any:
    """A message with every field set; of a oneof the member number `choice`, or its last one."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        chosen = field.containing_oneof
        if chosen is not None and chosen.fields[min(choice, len(chosen.fields) - 1)] is not field:
            continue
        set_field(message, field)
    return message


def set_field(message: Any, field: FieldDescriptor) -> None:
    """Give one field its values."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for one, other in zip(values_of(key), values_of(value), strict=True):
            entries = getattr(message, field.name)
            if value.message_type is not None:
                entries[one].CopyFrom(other)
            else:
                entries[one] = other
    elif field.is_repeated:
        getattr(message, field.name).extend(values_of(field))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(values_of(field)[0])
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, values_of(field)[0])


@pytest.mark.sample(90)
@pytest.mark.parametrize("choice", range(4))
@pytest.mark.parametrize("name", ALL)
def test_a_message_comes_back_whole(name: str, choice: int) -> None:
    sent = filled(ALL[name], choice)
    kind = type(sent)
    assert sent.ByteSize() > 0 or not ALL[name].fields
    assert kind.FromString(sent.SerializeToString()) == sent
    line, lines = one_line(sent), many_lines(sent).decode("ascii")
    assert line.isascii() and line.isprintable()
    assert text_format.Parse(line, kind()) == sent
    assert text_format.Parse(lines, kind()) == sent
    assert (
        json_format.Parse(json_format.MessageToJson(sent, preserving_proto_field_name=True), kind()) == sent
    )


def test_every_message_of_the_schema_is_looked_at() -> None:
    assert {"InferRequest", "ModelSequenceBatching.Control", "InferResponseHeader.Output.Class"} <= set(ALL)
    assert len(ALL) > 60
