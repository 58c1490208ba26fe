"""Protobuf text: the one-line form of headers, the form of bodies, and the reader of `NV-InferRequest`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from ipc.errors import InvalidInput
from ipc.protos import trtis_v1_pb2 as pb

CACHED_CHARACTERS = 2048
"""Headers up to this length are remembered, since clients send the same header again and again."""
MOST_MARKS = 8192
"""`MARKS` in a long header: everything that costs the parser time has at least one of these marks."""
MARKS = ":{}<>[],;\"'"
_PACKAGE = f"{pb.DESCRIPTOR.package}."
LATER_FIELDS = {
    "ServerStatus": ("model_control_stats", "shm_control_stats", "repository_stats"),
    "ModelVersionStatus": ("ready_state_reason", "last_inference_timestamp_milliseconds"),
    "ModelConfig": ("model_warmup",),
    "ModelInstanceGroup": ("profile",),
    "ModelInput": ("is_shape_tensor", "allow_ragged_batch"),
    "ModelOutput": ("is_shape_tensor",),
    "ModelDynamicBatching": ("preserve_ordering",),
    "ModelSequenceBatching": ("direct", "oldest"),
    "ModelSequenceBatching.Control": ("data_type",),
}
"""Fields that the specification marks as younger than release 1.4, by message."""
LATER_KINDS = (
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_END,
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID,
)
_COUNTS = ("StatDuration", "RequestStats")


def one_line(message: Message) -> str:
    """The message as one line of ASCII, for a header."""
    return text_format.MessageToString(message, as_one_line=True, as_utf8=False)


def many_lines(message: Message) -> bytes:
    """The message as text, for a body; the entries of maps are sorted."""
    return text_format.MessageToString(message, as_utf8=False).encode("ascii")


def read_request_header(text: str | None) -> pb.InferRequestHeader:
    """The header of a request; treat it as read-only. Raises `InvalidInput` with the place of the mistake.

    A header above `CACHED_CHARACTERS` takes up to 50 ms: too long for the event loop.
    """
    if text is None:
        raise InvalidInput("header NV-InferRequest is missing")
    if len(text) <= CACHED_CHARACTERS:
        return _remembered(text)
    if sum(map(text.count, MARKS)) > MOST_MARKS:
        raise InvalidInput(f"header NV-InferRequest has more than {MOST_MARKS} of the marks {MARKS}")
    return _parse(text)


def _parse(text: str) -> pb.InferRequestHeader:
    try:
        # NOTE: field values reach us as Latin-1; clients send UTF-8.
        return text_format.Parse(text.encode("latin-1").decode("utf-8"), pb.InferRequestHeader())
    except UnicodeError as error:
        raise InvalidInput(f"header NV-InferRequest is no UTF-8: {error}") from error
    except (text_format.ParseError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"header NV-InferRequest cannot be read at {str(error)[:300]}") from error


_remembered = lru_cache(maxsize=512)(_parse)


def as_of_1_4(status: pb.ServerStatus) -> pb.ServerStatus:
    """A copy with the fields of release 1.4: a reader of text refuses a whole status for one unknown name.

    Fields and names of values that are younger than release 1.4 are left out; the wire format and JSON have all of
    them. Counts of zero are left out too: later releases lack some of the families of release 1.4 (`profile_stats`).
    """
    copy = pb.ServerStatus()
    copy.CopyFrom(status)
    _prune(copy)
    return copy


def _prune(message: Any) -> None:
    for name in LATER_FIELDS.get(message.DESCRIPTOR.full_name.removeprefix(_PACKAGE), ()):
        message.ClearField(name)
    if isinstance(message, pb.ModelSequenceBatching):
        known = [
            each for each in message.control_input if all(c.kind not in LATER_KINDS for c in each.control)
        ]
        del message.control_input[:]
        message.control_input.extend(known)
    if isinstance(message, pb.ModelInstanceGroup) and message.kind == pb.ModelInstanceGroup.KIND_MODEL:
        message.ClearField("kind")
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Message):
            _prune(value)
            if value.DESCRIPTOR.name.endswith(_COUNTS) and not value.ByteSize():
                message.ClearField(field.name)
        elif not field.message_type.GetOptions().map_entry:
            for each in value:
                _prune(each)
        elif field.message_type.fields_by_name["value"].message_type is not None:
            for key in value:
                _prune(value[key])
