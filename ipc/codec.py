"""Messages to ZeroMQ frames and back, with limits checked before decoding.

A message is one msgpack frame, followed by at most one frame of raw tensor bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ipc.directions import ToFrontend, ToWorker
from ipc.errors import ProtocolError

MAX_FRAMES = 2
MAX_MESSAGE_NBYTES = 1 << 30

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_frontend: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
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
    """Message from a worker. Raises `ProtocolError` when it breaks the schema."""
    try:
        return _to_frontend.decode(_check(frames))
    except _UNDECODABLE as error:
        raise ProtocolError(f"undecodable message: {error}") from error
