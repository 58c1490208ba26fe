"""The frontend's end of the socket to one worker."""

from __future__ import annotations

from pathlib import Path

import zmq

_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def connect(context: zmq.Context[zmq.Socket[bytes]], path: Path, identity: str) -> zmq.Socket[bytes]:
    """A DEALER that connects to `path` and is known there as `identity`. Raises `zmq.ZMQError`."""
    socket = context.socket(zmq.DEALER)
    try:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 10000),
            (zmq.RCVHWM, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 500),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        socket.connect(f"ipc://{path}")
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def send(socket: zmq.Socket[bytes], message: bytes, frame: bytes | memoryview | None) -> None:
    """Send a message, and perhaps a frame after it. Raises `zmq.Again` when the socket takes nothing."""
    if frame is None:
        socket.send(message, _NOBLOCK)
    else:
        socket.send(message, _MORE)
        socket.send(frame, _NOBLOCK)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has arrived."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message, frame by frame. Raises `zmq.Again` when there is none."""
    return socket.recv_multipart(_NOBLOCK)
