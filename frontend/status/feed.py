"""Builds the frames of the status stream, once for all viewers of this frontend, and only while there is one.

1. The first viewer starts the feed: all workers are asked for `Stats`.
2. Every 200 ms: look at the channels on the loop, read the files and encode the frame in a thread.
3. A viewer that was slow gets the newest frame next; those between are left out, so nothing piles up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import orjson

from frontend.services import Services
from frontend.status.frame import View, build
from frontend.status.traffic import TrafficReader
from ipc.errors import PenstockError, QueueFull

log = logging.getLogger(__name__)

EVERY_S = 0.2
FIRST_LOOKS, LOOK_EVERY_S = 50, 0.01


class Feed:
    """The frames of this frontend."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._traffic = TrafficReader(services.settings.paths)
        self._viewers = 0
        self._frame, self._number = "", 0
        self._change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise `QueueFull` when this frontend has `limits.max_status_streams` viewers."""
        limit = self._services.settings.limits.max_status_streams
        if self._viewers >= limit:
            raise QueueFull(f"{limit} status streams are open (limits.max_status_streams)", retry_after_s=5)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count one more viewer, and let the feed run while there is any."""
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield
        finally:
            self._viewers -= 1

    async def frames(self) -> AsyncIterator[str]:
        """The newest frame, then each time the newest again; ends with the feed."""
        seen = 0
        while self._task is not None:
            change = self._change
            if self._number in (0, seen):
                await change.wait()
                continue
            seen = self._number
            yield self._frame

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._first_stats()
            while self._viewers and not self._services.drain.draining:
                began = loop.time()
                await self._publish()
                await asyncio.sleep(max(EVERY_S / 4, EVERY_S - (loop.time() - began)))
        except Exception:
            log.exception("the status stream ends")
        finally:
            self._services.directory.watch(False)
            self._task, self._number = None, 0
            self._wake()

    async def _first_stats(self) -> None:
        """Wait a moment for the workers' first answers, so that the first frame is complete."""
        for _ in range(FIRST_LOOKS):
            if self._services.directory.watch(True):
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _publish(self) -> None:
        services = self._services
        services.directory.watch(True)
        services.recorder.flush()
        view = View(services.directory.workers(), *services.engine.ready())
        try:
            self._frame = await asyncio.to_thread(self._encode, view)
        except (OSError, PenstockError) as error:
            log.error("a frame of the status stream was left out: %s", error)
            return
        self._number += 1
        self._wake()

    def _encode(self, view: View) -> str:
        return orjson.dumps(build(self._services, view, self._traffic.read())).decode()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
