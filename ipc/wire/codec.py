"""Messages to ZeroMQ frames and back, with limits checked before decoding.

1. Messages that leave together travel in one `Bundle`: a frame with all messages and all small payloads of raw bytes,
   then one frame per large payload, in order. The first frame is the array `[messages, carriers, small]`: each message
   is msgpack of its own inside a binary string, `carriers` are the indices of the messages with a large payload, and
   `small` maps the index of a message to its small payload.
2. `send` and `receive` move all frames of one bundle together over a ZeroMQ socket, the same at both ends.
3. `unpack` takes a bundle apart. Each message is decoded alone, so that a bad message never harms its neighbours.
4. msgpack has integers up to 64 bits. `long_integer_in` finds the first integer of a value that is larger, and
   `unsendable` tells a client of the value.

A state of a model that breaks the schema costs that model only. A worker tells a failed state in its place (`sayable`),
and a frontend that cannot read a state takes it as a failed one and keeps the states of all other models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

from ipc.errors import InvalidInput, ProtocolError
from ipc.wire.catalogs import Entries, Heard, Replied, Reread, Spread, Told
from ipc.wire.messages import (
    Call,
    Cancel,
    Credits,
    Failure,
    Goodbye,
    Hello,
    InputFreed,
    Inputs,
    Leaving,
    Load,
    Models,
    ModelStatus,
    Ping,
    Pong,
    Release,
    Result,
    Submit,
    Unload,
    Watch,
    Welcome,
    Wire,
)
from ipc.wire.stats import Look, Looked, Stats
from ipc.wire.streams import Deltas, DeltasTaken, Part, PartsConsumed

log = logging.getLogger(__name__)

ToWorker = (
    Hello
    | Submit
    | Cancel
    | Release
    | PartsConsumed
    | DeltasTaken
    | Load
    | Unload
    | Ping
    | Watch
    | Inputs
    | Reread
    | Spread
    | Heard
    | Look
    | Goodbye
)
ToFrontend = (
    Welcome
    | Result
    | Part
    | Deltas
    | Failure
    | InputFreed
    | Credits
    | Models
    | Entries
    | Replied
    | Told
    | Stats
    | Looked
    | Leaving
    | Pong
    | Goodbye
)
"""The messages that each side may send."""

MAX_MESSAGES = 256
"""Most messages of a bundle, and thereby most payloads."""
MAX_MESSAGE_NBYTES = 1 << 30
_FULL_NBYTES = 1 << 20
_SMALL_NBYTES = 4 << 10
"""PERF: copying so many bytes costs less than a frame, which both sides send and receive with calls of its own."""

Payload = bytes | memoryview
"""Raw bytes that travel with a message."""
# PERF: plain numbers, because the enums of pyzmq cost more than the system call.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)
_NOBLOCK = int(zmq.NOBLOCK)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1
"""The integers of msgpack."""
# Free maps of a request may hold values that no message can: numbers beyond 64 bits, hundreds of levels.
UNSENDABLE = (OverflowError, RecursionError)
"""What encoding raises for the values of a request that no message can hold."""
_TOO_DEEP = "options, schemas, metadata, tools or messages: values are nested too deep"
_SHOWN, _SHOWN_PATH = 64, 512


class _Head(Wire, frozen=True):
    messages: list[memoryview]
    carriers: list[int]
    small: dict[int, bytes] = msgspec.field(default_factory=dict)


_encoder = msgspec.msgpack.Encoder()
_head: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
_status: msgspec.msgpack.Decoder[ModelStatus] = msgspec.msgpack.Decoder(ModelStatus)
_place = re.compile(r"`\$\[(\d+)\]([^`]*)`")
_WITH_STATES: dict[str, type[Models] | type[Welcome]] = {"models": Models, "welcome": Welcome}
# Text that is not UTF-8 is a ValueError, deep nesting a RecursionError; neither is a DecodeError.
_UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Bundle:
    """Messages on their way to one receiver that have not left yet."""

    __slots__ = ("_carriers", "_nbytes", "_payloads", "_small", "_texts")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._texts: list[bytes] = []
        self._carriers: list[int] = []
        self._payloads: list[Payload] = []
        self._small: dict[int, Payload] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def full(self) -> bool:
        """Whether the bundle must leave before another message is added."""
        return self._nbytes >= _FULL_NBYTES or len(self._texts) >= MAX_MESSAGES

    def add(self, message: ToWorker | ToFrontend, payload: Payload | None = None) -> None:
        """Encode a message. Raises what msgspec raises for a message with values that cannot be told."""
        text = _encoder.encode(message)
        if payload is not None:
            self._nbytes += len(payload)
            if len(payload) <= _SMALL_NBYTES:
                self._small[len(self._texts)] = payload
            else:
                self._carriers.append(len(self._texts))
                self._payloads.append(payload)
        self._texts.append(text)
        self._nbytes += len(text)

    def take(self) -> list[Payload]:
        """The frames of all messages added so far; the bundle is empty afterwards."""
        frames: list[Payload] = [_encoder.encode((self._texts, self._carriers, self._small)), *self._payloads]
        self._clear()
        return frames


def encode(message: ToWorker | ToFrontend) -> bytes:
    """The bytes of one message of a bundle."""
    return _encoder.encode(message)


def unpack(frames: Sequence[bytes]) -> list[tuple[memoryview, bytes]]:
    """The messages of a bundle, each with its payload, which is empty for most.

    Raises `ProtocolError` when the frames are not a bundle.
    """
    if not 1 <= len(frames) <= MAX_MESSAGES + 1:
        raise ProtocolError(f"{len(frames)} frames, expected 1 to {MAX_MESSAGES + 1}")
    if len(frames[0]) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"message of {len(frames[0])} bytes is over {MAX_MESSAGE_NBYTES}")
    try:
        head = _head.decode(frames[0])
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable bundle: {error}") from error
    if len(head.messages) > MAX_MESSAGES:
        raise ProtocolError(f"{len(head.messages)} messages, expected at most {MAX_MESSAGES}")
    unpacked: list[tuple[memoryview, bytes]] = [(text, b"") for text in head.messages]
    payloads = head.small
    if head.carriers or len(frames) > 1:
        if sorted(set(head.carriers)) != head.carriers or len(head.carriers) != len(frames) - 1:
            raise ProtocolError(f"{len(frames) - 1} payloads do not fit their messages")
        payloads = payloads | dict(zip(head.carriers, frames[1:], strict=True))
        if len(payloads) != len(head.small) + len(head.carriers):
            raise ProtocolError("a message has two payloads")
    for carrier, payload in payloads.items():
        if not 0 <= carrier < len(unpacked):
            raise ProtocolError(f"a payload of message {carrier}, of {len(unpacked)}")
        unpacked[carrier] = (unpacked[carrier][0], payload)
    return unpacked


def decode_to_worker(text: bytes | memoryview) -> ToWorker:
    """Message from a frontend. Raises `ProtocolError` for a message that breaks the schema."""
    try:
        return _to_worker.decode(text)
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable message: {error}") from error


def decode_to_frontend(text: bytes | memoryview) -> ToFrontend:
    """Message from a worker. Raises `ProtocolError` when it breaks the schema, states of models aside."""
    try:
        return _to_frontend.decode(text)
    except _UNDECODABLE as error:
        message = _with_readable_states(text)
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
    match = _place.search(str(error))
    if match is not None:
        name = ModelStatus.__struct_fields__[int(match[1])]
        return f"{name}{match[2]}: {str(error).partition(' - at ')[0]}"
    for name, value in msgspec.structs.asdict(status).items():
        try:
            _encoder.encode(value)
        except (ValueError, OverflowError, TypeError, RecursionError) as reason:
            return f"{name}: {reason}"
    return str(error)


def _unsayable(name: str, reason: str) -> ModelStatus:
    return ModelStatus(name, "failed", error_class="UNKNOWN", error_message=reason, permanent=True)


def _with_readable_states(text: bytes | memoryview) -> Models | Welcome | None:
    """A message with the states of models, where nothing but some of these is wrong with the message."""
    try:
        parts = msgspec.msgpack.decode(text)
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
        match = _place.search(str(error))
        field = f"{ModelStatus.__struct_fields__[int(match[1])]}{match[2]}: " if match else ""
        reason = field + str(error).partition(" - at ")[0]
        log.error("what a worker tells of model %a cannot be read: %s", name, reason)
        return _unsayable(name, f"the worker's word about this model cannot be read: {reason}")


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The frames of the next message; None when no message has arrived. Raises `zmq.Again`."""
    if not int(socket.get(_EVENTS)) & _POLLIN:
        return None
    frames = [socket.recv(_NOBLOCK)]
    while socket.get(_RCVMORE):
        frames.append(socket.recv(_NOBLOCK))
    return frames


def send(socket: zmq.Socket[bytes], frames: list[Payload]) -> None:
    """Send one message of these frames. Raises `zmq.Again` when the socket takes nothing."""
    *heads, last = frames
    for frame in heads:
        socket.send(frame, MORE)
    socket.send(last, _NOBLOCK)


class LongInteger(NamedTuple):
    """An integer that no message can carry, and the path of the integer within its value."""

    path: str
    number: int

    def __str__(self) -> str:
        path = self.path.lstrip(".")
        place = f"{path[:_SHOWN_PATH]}{'...' * (len(path) > _SHOWN_PATH)}: " if path else ""
        return f"{place}{shown(self.number)} is beyond 64 bits: integers go from {SMALLEST} to {LARGEST}"


def long_integer_in(value: Any) -> LongInteger | None:
    """The first integer in lists, maps and structs of `value` that is beyond 64 bits.

    The walk keeps its own stack, as a request may be nested as deep as Python's stack allows.
    """
    steps, levels = list[str](), [iter([("", value)])]
    while levels:
        for step, part in levels[-1]:
            if not isinstance(part, int):
                steps.append(step)
                levels.append(_parts(part))
                break
            if not SMALLEST <= part <= LARGEST:
                return LongInteger("".join([*steps, step]), part)
        else:
            levels.pop()
            del steps[-1:]
    return None


def unsendable(call: Call, error: Exception) -> InvalidInput:
    """The error of a request that no message can carry; `error` is one of `UNSENDABLE`."""
    long = long_integer_in(call) if isinstance(error, OverflowError) else None
    return InvalidInput(_TOO_DEEP if long is None else str(long))


def shown(number: int) -> str:
    """The beginning of an integer for messages."""
    try:
        text = str(number)
    except ValueError:
        # NOTE: Python refuses to print integers of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        return ((f".{name}", getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, Mapping):
        return ((f".{str(name)[:_SHOWN]}", part) for name, part in value.items())
    entries = value if isinstance(value, list | tuple) else ()
    return ((f"[{at}]", part) for at, part in enumerate(entries))
