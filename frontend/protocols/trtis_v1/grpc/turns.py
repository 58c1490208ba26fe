"""The order of answers on a stream, for models with `preserve_ordering`: each waits for the one asked for before it.

Workers keep the order of what they are sent, but the requests of one stream may go to several of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ipc.catalog.model_config import ModelConfig


class Turn:
    """The place of one request among those of its stream for the same model."""

    def __init__(self, before: asyncio.Event | None) -> None:
        self._before = before
        self.keeps_order = False

    def of(self, config: ModelConfig) -> None:
        """Learn whether the model keeps an order."""
        batching = config.dynamic_batching
        self.keeps_order = batching is not None and batching.preserve_ordering

    async def come(self) -> None:
        """Wait until the request before this one has been answered."""
        if self.keeps_order and self._before is not None:
            await self._before.wait()


class Turns:
    """The last request of each model on each rpc that is under way."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], asyncio.Event] = {}

    @contextmanager
    def take(self, rpc: object, model: str) -> Iterator[Turn]:
        """The turn of a request, in the order in which this is called; the next one comes when it is left."""
        # NOTE: the rpc lives as long as any of its requests, so its number belongs to no other one meanwhile.
        key, mine = (id(rpc), model), asyncio.Event()
        before, self._last[key] = self._last.get(key), mine
        try:
            yield Turn(before)
        finally:
            mine.set()
            if self._last.get(key) is mine:
                del self._last[key]
