"""Bundles on a ZeroMQ socket, the same at both ends: all frames of one message are received and sent together."""

from __future__ import annotations

import zmq

from ipc.wire import codec

# PERF: plain numbers, because the enums of pyzmq cost more than the system call.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)
_NOBLOCK = int(zmq.NOBLOCK)
MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The frames of the next message; None when no message has arrived. Raises `zmq.Again`."""
    if not int(socket.get(_EVENTS)) & _POLLIN:
        return None
    frames = [socket.recv(_NOBLOCK)]
    while socket.get(_RCVMORE):
        frames.append(socket.recv(_NOBLOCK))
    return frames


def send(socket: zmq.Socket[bytes], frames: list[codec.Payload]) -> None:
    """Send one message of these frames. Raises `zmq.Again` when the socket takes nothing."""
    *heads, last = frames
    for frame in heads:
        socket.send(frame, MORE)
    socket.send(last, _NOBLOCK)
