"""A value at a broker that several gateways of this process share, each with its own copy, which may be old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ipc.errors import QueueUnavailable
from ipc.wire.cluster_pools import Pools


class Cell:
    """What the broker keeps."""

    def __init__(self, value: Any = None) -> None:
        self.value = Pools() if value is None else value
        self.revision = 0
        self.up = True


class SharedCopy:
    """Stands in for `Shared`: one process's copy. `read` takes in what the broker keeps."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.value, self.revision = cell, cell.value, cell.revision
        self.on_change: Callable[[], None] = lambda: None
        self.is_read = True

    def read(self) -> None:
        before, self.value, self.revision = self.value, self.cell.value, self.cell.revision
        if self.value != before:
            self.on_change()

    async def change(self, change: Callable[[Any], Any]) -> Any:
        if not self.cell.up:
            raise QueueUnavailable("no broker", retry_after_s=1)
        await asyncio.sleep(0)
        self.read()
        changed = change(self.value)
        if changed != self.cell.value:
            self.cell.value, self.cell.revision = changed, self.cell.revision + 1
            self.read()
        return changed
