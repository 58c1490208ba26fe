"""A status as release 1.4 knows it, for its text form: a reader of text refuses the whole of it for one unknown name.

1. Fields and names of values that are younger than release 1.4 are left out; the wire format and JSON have all of them.
2. Counts of zero are left out too: later releases lack some of the families that release 1.4 has (`profile_stats`).
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from ipc.protos import trtis_v1_pb2 as pb

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
"""What the specification marks as younger than release 1.4, by message."""
LATER_KINDS = (
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_END,
    pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID,
)
_COUNTS = ("StatDuration", "RequestStats")


def as_of_1_4(status: pb.ServerStatus) -> pb.ServerStatus:
    """A copy with what release 1.4 knows."""
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
