"""The frontend's end of the socket to one worker.

1. Messages of one turn of the event loop wait in a bundle and leave together at the end of the turn.
2. Arriving messages are handed over one by one, for `LOOK_S` in one turn. The ZeroMQ descriptor is edge-triggered, so
   every send is followed by another look at the socket.

`Silence` measures how long the worker has sent nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ipc.errors import ProtocolError
from ipc.memory import copies
from ipc.wire import codec
from ipc.wire.codec import ToFrontend, ToWorker, receive, send

log = logging.getLogger(__name__)

SILENCE_S = 2.0
"""A worker that was not heard for so long is not well."""
LONGEST_LOOK_S = 0.25
"""The most that counts as silence between two looks."""
LOOK_S = 0.005
"""A worker that sends without a pause has the loop for so long at a time."""


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


class Dealer:
    """One DEALER socket on the running event loop.

    `take(message, payload)` gets every message. `sent` is called after every attempt to send a bundle, with False
    when the socket took nothing: the messages of that bundle are lost.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        take: Callable[[ToFrontend, bytes], None],
        sent: Callable[[bool], None],
    ) -> None:
        self._socket: zmq.Socket[bytes] | None = socket
        self._take, self._sent = take, sent
        self._loop = asyncio.get_running_loop()
        self._bundle = codec.Bundle()
        self._turn_scheduled = False
        self._loop.add_reader(socket.FD, self.look)
        self._schedule()

    def put(
        self, message: ToWorker, payload: codec.Payload | None = None, introduction: ToWorker | None = None
    ) -> None:
        """Let a message leave at the end of this turn, with its introduction before it in the same bundle.

        Raises what msgspec raises for values that cannot be told.
        """
        if self._bundle.full or (introduction is not None and len(self._bundle) >= codec.MAX_MESSAGES - 1):
            self.flush()
        if introduction is not None:
            self._bundle.add(introduction)
        self._bundle.add(message, payload)
        if payload is not None:
            copies.count("frame", len(payload))
        self._schedule()

    def flush(self) -> bool:
        """Send all waiting messages now; returns whether the socket took them."""
        if self._socket is None or not len(self._bundle):
            return self._socket is not None
        frames = self._bundle.take()
        try:
            send(self._socket, frames)
            taken = True
        except zmq.Again:
            taken = False
        self._schedule()
        self._sent(taken)
        return taken

    def look(self) -> None:
        """Take in what has arrived for `LOOK_S` at most, and the rest in the next turn, after all who read streams."""
        until = time.monotonic() + LOOK_S
        while self._take_one():
            if time.monotonic() >= until:
                self._schedule()
                return

    def drain(self) -> None:
        """Take in everything that has arrived; nobody sends any more."""
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        """Take in one bundle; returns whether there was one."""
        if self._socket is None:
            return False
        try:
            frames = receive(self._socket)
        except zmq.Again:
            return False
        if frames is None:
            return False
        self._hand_over(frames)
        return True

    def close(self) -> None:
        """Close the socket; messages that have not left are lost."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(0)
            self._socket = None

    def _hand_over(self, frames: list[bytes]) -> None:
        try:
            arrived = codec.unpack(frames)
        except ProtocolError as error:
            log.error("a worker sent bad frames: %s", error.message)
            return
        for text, payload in arrived:
            if self._socket is None:
                return
            try:
                self._take(codec.decode_to_frontend(text), payload)
            except ProtocolError as error:
                log.error("a worker sent a bad message: %s", error.message)
            except Exception:
                # NOTE: results of other requests lie behind the message, and nobody sends these results again.
                log.exception("a message of a worker could not be taken")

    def _schedule(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn_scheduled = False
        self.flush()
        self.look()


class Silence:
    """How long a worker was not heard of, counted only while this process ran.

    A process that stood still itself finds old answers of healthy workers when it goes on.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked = time.monotonic()
        self.heard_at = time.time()
        """When the worker was last heard (Unix seconds)."""

    @property
    def is_long(self) -> bool:
        """Whether the worker has sent nothing for `SILENCE_S`."""
        return self._seconds >= SILENCE_S

    def look(self) -> None:
        """Some time has passed; called several times a second."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now

    def end(self) -> None:
        """The worker was heard."""
        self._seconds, self.heard_at = 0.0, time.time()
