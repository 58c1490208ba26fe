"""The worker's end of the socket to all frontends."""

from __future__ import annotations

from pathlib import Path

import zmq

from ipc.wire import codec

# PERF: plain numbers, because the enums of pyzmq cost more than the system call.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)
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
    """The next bundle that has arrived, the sender's identity first; None when there is none. Raises `zmq.Again`."""
    if not int(socket.get(_EVENTS)) & _POLLIN:
        return None
    frames = [socket.recv(_NOBLOCK)]
    while socket.get(_RCVMORE):
        frames.append(socket.recv(_NOBLOCK))
    return frames


def send(socket: zmq.Socket[bytes], key: bytes, frames: list[codec.Payload]) -> None:
    """Send one bundle to the frontend `key`. Raises `zmq.ZMQError` when the frontend takes none."""
    # NOTE: only the first part can be refused; the rest of a message that has begun is always taken.
    socket.send(key, _MORE)
    *heads, last = frames
    for frame in heads:
        socket.send(frame, _MORE)
    socket.send(last, _NOBLOCK)
