"""Answers that wait for their clients: how many bytes this frontend holds for them, and for how long.

gRPC takes an answer whole and does not tell how much of it has left, so it counts whole until all of it has.

1. What the client has taken within `arena.lease_copy_after_s` is not counted.
2. The rest shares `arena.copy_out_bytes` with the slow readers of HTTP. What finds no room there is dropped at once.
3. What was not taken after `server.write_stall_s` is dropped. To drop an answer is to end its rpc.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from frontend.services import Services

log = logging.getLogger(__name__)


class Waiting:
    """One answer from now until `end`; `drop` is called for one that may wait no longer."""

    __slots__ = ("_counted_nbytes", "_drop", "_nbytes", "_path", "_services", "_timer")

    def __init__(self, services: Services, path: str, nbytes: int, drop: Callable[[], None]) -> None:
        self._services, self._path, self._nbytes, self._drop = services, path, nbytes, drop
        self._counted_nbytes = 0
        after_s = services.settings.arena.lease_copy_after_s
        self._timer = asyncio.get_running_loop().call_later(after_s, self._count)

    def end(self, _: object = None) -> None:
        """It was taken, or its rpc has ended."""
        self._timer.cancel()
        self._services.copies.give(self._counted_nbytes)
        self._counted_nbytes = 0

    def _count(self) -> None:
        settings = self._services.settings
        if not self._services.copies.take(self._nbytes):
            self._end_rpc("no room for what slow clients have not taken yet")
            return
        self._counted_nbytes = self._nbytes
        left_s = settings.server.write_stall_s - settings.arena.lease_copy_after_s
        self._timer = asyncio.get_running_loop().call_later(
            max(left_s, 0.0), self._end_rpc, "its client does not read"
        )

    def _end_rpc(self, why: str) -> None:
        log.warning("%s: an answer of %d bytes is dropped: %s", self._path, self._nbytes, why)
        self._drop()
