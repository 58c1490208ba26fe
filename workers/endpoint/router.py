"""The worker's end of the socket to all frontends."""

from __future__ import annotations

from pathlib import Path

import zmq

from ipc.wire import bundles, codec
from ipc.wire.bundles import receive

__all__ = ["bind", "receive", "send"]


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


def send(socket: zmq.Socket[bytes], key: bytes, frames: list[codec.Payload]) -> None:
    """Send one bundle to the frontend `key`. Raises `zmq.ZMQError` when the frontend takes none."""
    # NOTE: only the first part can be refused; the rest of a message that has begun is always taken.
    socket.send(key, bundles.MORE)
    bundles.send(socket, frames)
