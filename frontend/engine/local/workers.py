"""The workers of this host as one frontend knows them: a channel to each, and waiting for their changes.

Every 100 ms: look for worker sockets in the run directory and advance every channel.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import TypeVar

import zmq

from frontend.engine.interface import Payload
from frontend.engine.local.channel import Channel
from ipc import deadline
from ipc.errors import ModelLoading, ModelNotLoaded, NoReplica, PenstockError, QueueFull
from ipc.processes.liveness import is_held
from ipc.processes.paths import RunPaths
from ipc.settings import Settings
from ipc.wire.messages import Work

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

TICK_S = 0.1
LOOK_AGAIN_S = 0.25
"""A wait looks again after so long, also without a change."""
PASSING = (NoReplica, ModelLoading, ModelNotLoaded, QueueFull)
"""Errors of a choice of worker that may pass."""
_SOCKET_NAME = re.compile(r"^worker-(\d+)\.sock$")


class Workers:
    """All channels of this frontend."""

    def __init__(self, paths: RunPaths, settings: Settings, name: str) -> None:
        self._paths, self._name, self._limits = paths, name, settings.limits
        self._on_demand = settings.catalog.on_demand
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channels: list[Channel] = []
        """By slot."""
        self._change = asyncio.Event()
        self.on_suspect: Callable[[Work, Payload, bool], None] = lambda work, payload, alone: None
        """That of all channels (`Channel.on_suspect`); set before the first tick."""
        self.follow: Callable[[], None] = lambda: None
        """Called after every change, before tasks that wait for a change look."""

    def close(self) -> None:
        """Say goodbye to all workers."""
        for channel in self.channels:
            channel.close()

    def end(self) -> None:
        """Close the sockets, once their goodbyes are on the way."""
        self._context.destroy(linger=0)

    def tick(self) -> None:
        """Join new workers and advance all channels."""
        try:
            self._discover()
        except OSError as error:
            log.error("looking for workers failed: %s", error)
        for channel in self.channels:
            channel.tick()

    def _discover(self) -> None:
        known = {channel.slot for channel in self.channels}
        for path in self._paths.root.iterdir():
            match = _SOCKET_NAME.match(path.name)
            if match and int(match[1]) not in known:
                channel = Channel(self._context, self._paths, int(match[1]), self._name, self.changed)
                channel.on_suspect = self.on_suspect
                self.channels.append(channel)
                self.channels.sort(key=lambda channel: channel.slot)

    def is_open(self, slot: int) -> bool:
        """Whether a worker lives in a slot and takes requests, of frontends that have joined it.

        This frontend joins a new worker within its next ticks. Other frontends may have begun sequences there before.
        """
        # NOTE: the lock first. The socket of a dead worker keeps its name until the next life has the lock.
        try:
            return self.lives(slot) and self._paths.worker_socket(slot).exists()
        except OSError:
            # NOTE: without a descriptor nobody knows. The caller waits and looks again.
            return True

    def lives(self, slot: int) -> bool:
        """Whether a worker lives in a slot. Raises `OSError` without a descriptor."""
        return is_held(self._paths.lock(f"worker-{slot}"))

    def watch(self, on: bool) -> bool:
        """Ask all workers to send `Stats`, or to stop; returns whether all serving workers have answered since."""
        for channel in self.channels:
            channel.watch(on)
        return all(channel.stats is not None for channel in self.channels if channel.state == "ready")

    def changed(self) -> None:
        """A worker's state, models or credits are others: wake everything that waits."""
        self.follow()
        self._change.set()
        self._change = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait for the next change, or so long; never longer than `LOOK_AGAIN_S`."""
        change = self._change
        try:
            async with asyncio.timeout(min(timeout_s, LOOK_AGAIN_S)):
                await change.wait()
        except TimeoutError:
            return

    async def wait(self, done: Callable[[], bool], deadline_ns: int) -> None:
        """Wait until `done()`, looked at after every change. Raises `DeadlineExceeded`."""
        while not done():
            deadline.check(deadline_ns, "before the workers were done")
            await self.change(deadline.remaining_s(deadline_ns))

    @staticmethod
    def at_once(choose: Callable[[A], T], subject: A, deadline_ns: int) -> T | None:
        """The result of `choose` now; None if its error may pass. Raises other errors, and `DeadlineExceeded`."""
        deadline.check(deadline_ns, "before a worker could be found")
        try:
            return choose(subject)
        except PASSING:
            return None

    async def until(
        self,
        attempt: Callable[[], T],
        deadline_ns: int,
        *,
        want: Callable[[], None] = lambda: None,
        patient: bool = False,
    ) -> T:
        """`attempt` again after every change, until it succeeds or its error has outlasted its wait.

        `want` asks for the model that nobody has. A full queue is an answer at once, unless `patient`: a request that
        lost its worker waits for a credit.
        """
        give_up: dict[bool, int] = {}
        while True:
            deadline.check(deadline_ns, "before a worker could be found")
            try:
                return attempt()
            except PASSING as error:
                loads = isinstance(error, ModelLoading | ModelNotLoaded)
                if loads:
                    want()
                if self._is_final(error, patient):
                    raise
                wait_s = self._limits.load_wait_s if loads else self._limits.restart_wait_s
                until_ns = give_up.setdefault(loads, deadline.after(wait_s))
                left_s = deadline.remaining_s(min(until_ns, deadline_ns))
                if left_s <= 0:
                    raise
            await self.change(left_s)

    def _is_final(self, error: PenstockError, patient: bool) -> bool:
        """Whether an error that may pass is not waited for."""
        if isinstance(error, QueueFull):
            return not patient
        return isinstance(error, ModelNotLoaded) and not self._on_demand
