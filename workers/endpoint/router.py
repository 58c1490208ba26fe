"""The worker's end of the socket to all frontends.

PERF: flags are plain numbers here and in `frontend.engine.local.dealer`; the enums of pyzmq cost more than the
system call they are for.
"""

from __future__ import annotations

from pathlib import Path

import zmq

from ipc.wire import codec

_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def bind(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    """A ROUTER that listens at `path`. Raises `zmq.ZMQError`."""
    socket = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 1),
        (zmq.SNDHWM, 10000),
        (zmq.RCVHWM, 10000),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_NBYTES)
    socket.bind(f"ipc://{path}")
    return socket


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message that has arrived, sender's identity first; None when there is none."""
    if not int(socket.get(_EVENTS)) & _POLLIN:
        return None
    try:
        return socket.recv_multipart(_NOBLOCK)
    except zmq.Again:
        return None


def send(socket: zmq.Socket[bytes], key: bytes, message: bytes, frame: bytes | None) -> None:
    """Send a message, and perhaps a frame after it, to the frontend `key`. Raises `zmq.ZMQError` when it takes none."""
    # NOTE: only the first part can be refused; the rest of a message that has begun is always taken.
    socket.send(key, _MORE)
    if frame is None:
        socket.send(message, _NOBLOCK)
    else:
        socket.send(message, _MORE)
        socket.send(frame, _NOBLOCK)
