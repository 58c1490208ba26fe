"""Work that goes on when the request that began the work is over: a drain waits for such work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from frontend.server.drain import Drain

LOOK_EVERY_S = 0.1
LAST_S = 0.2
"""Time for what streams leave behind that have just ended, such as the row of a response."""


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

    async def end(self, drain: Drain) -> None:
        """Wait for all of the work until the drain is over, then cancel the rest, and wait for its end."""
        while self._tasks and not drain.is_over:
            await asyncio.wait(self._tasks, timeout=LOOK_EVERY_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
