"""Work that goes on when the request that began the work is over: a drain waits for such work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any


class Background:
    """The tasks of this process that no request waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work`, which ends its errors itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self, until_s: float) -> None:
        """Wait for all of the work until `until_s` (`time.monotonic`), then cancel the rest, and wait for its end."""
        while self._tasks and (left_s := until_s - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
