"""Messages to ZeroMQ frames and back, with limits checked before decoding.

A message is one msgpack frame, followed by at most one frame of raw tensor bytes.

A state of a model that breaks the schema costs that model only. A worker tells a failed state in its place (`sayable`),
and a frontend that cannot read a state takes it as a failed one and keeps the states of all other models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ipc.errors import ProtocolError
from ipc.wire.directions import ToFrontend, ToWorker
from ipc.wire.messages import Models, ModelStatus, Welcome

log = logging.getLogger(__name__)

MAX_FRAMES = 2
MAX_MESSAGE_NBYTES = 1 << 30

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
_status: msgspec.msgpack.Decoder[ModelStatus] = msgspec.msgpack.Decoder(ModelStatus)
_place = re.compile(r"`\$\[(\d+)\]([^`]*)`")
_WITH_STATES: dict[str, type[Models] | type[Welcome]] = {"models": Models, "welcome": Welcome}
# Text that is not UTF-8 is a ValueError, deep nesting a RecursionError; neither is a DecodeError.
_UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)


def encode(message: ToWorker | ToFrontend) -> bytes:
    """One message as one frame."""
    return _encoder.encode(message)


def _check(frames: Sequence[bytes]) -> bytes:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, expected 1 to {MAX_FRAMES}")
    if len(frames[0]) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message of {len(frames[0])} bytes is over {MAX_MESSAGE_NBYTES}")
    return frames[0]


def decode_to_worker(frames: Sequence[bytes]) -> ToWorker:
    """Message from a frontend. Raises `ProtocolError` when it breaks the schema."""
    try:
        return _to_worker.decode(_check(frames))
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable message: {error}") from error


def decode_to_frontend(frames: Sequence[bytes]) -> ToFrontend:
    """Message from a worker. Raises `ProtocolError` when it breaks the schema, states of models aside."""
    try:
        return _to_frontend.decode(_check(frames))
    except _UNDECODABLE as error:
        message = _with_readable_states(frames[0])
        if message is None:
            raise ProtocolError(f"undecodable message: {error}") from error
        return message


def check_status(status: ModelStatus) -> None:
    """Raise `ProtocolError`, which names the field, for a state that a frontend could not read."""
    try:
        _status.decode(_encoder.encode(status))
    except (*_UNDECODABLE, OverflowError, TypeError) as error:
        raise ProtocolError(f"the state of the model cannot be told: {_field_of(status, error)}") from error


def sayable(status: ModelStatus) -> ModelStatus:
    """The same state, or a failed one with the reason where a field of the state breaks the schema."""
    try:
        check_status(status)
    except ProtocolError as error:
        return _unsayable(status.name.encode("utf-8", "replace").decode(), error.message)
    return status


def _field_of(status: ModelStatus, error: Exception) -> str:
    """What is wrong, with the name of the field. Only decoding tells the place, encoding does not."""
    found = _place.search(str(error))
    if found is not None:
        name = ModelStatus.__struct_fields__[int(found[1])]
        return f"{name}{found[2]}: {str(error).partition(' - at ')[0]}"
    for name, value in msgspec.structs.asdict(status).items():
        try:
            _encoder.encode(value)
        except (ValueError, OverflowError, TypeError, RecursionError) as reason:
            return f"{name}: {reason}"
    return str(error)


def _unsayable(name: str, reason: str) -> ModelStatus:
    return ModelStatus(name, "failed", error_class="UNKNOWN", error_message=reason, permanent=True)


def _with_readable_states(frame: bytes) -> Models | Welcome | None:
    """A message with the states of models, where nothing but some of these is wrong with the message."""
    try:
        parts = msgspec.msgpack.decode(frame)
        kind = _WITH_STATES[parts[0]]
        at = kind.__struct_fields__.index("models") + 1
        states, parts[at] = parts[at], []
        message: Models | Welcome = msgspec.convert(parts, kind)
        return msgspec.structs.replace(message, models=[_read_state(state) for state in states])
    except (*_UNDECODABLE, KeyError, IndexError, TypeError):
        return None


def _read_state(state: Any) -> ModelStatus:
    """One state out of a message. Raises ValidationError for a state without a name."""
    try:
        return msgspec.convert(state, ModelStatus)
    except msgspec.ValidationError as error:
        name = msgspec.convert(state[:1], list[str])[0]
        found = _place.search(str(error))
        field = f"{ModelStatus.__struct_fields__[int(found[1])]}{found[2]}: " if found else ""
        reason = field + str(error).partition(" - at ")[0]
        log.error("what a worker tells of model %a cannot be read: %s", name, reason)
        return _unsayable(name, f"the worker's word about this model cannot be read: {reason}")
