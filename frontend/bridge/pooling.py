"""Which pool a box belongs to, and the models that the pool keeps loaded.

1. The pools are a shared value, which gateways write. A box that no pool has belongs to the pool of its settings.
2. A box loads what its pool has pinned, one model after the other, and tries models again that could not be loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from frontend.cluster.broker import Broker
from frontend.cluster.shared import Shared
from frontend.engine.interface import Models
from ipc import deadline
from ipc.errors import PenstockError
from ipc.logs import Seldom
from ipc.settings import Settings
from ipc.wire.cluster_names import Names
from ipc.wire.cluster_pools import Pools, read_pools, write_pools

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0


class Membership:
    """The pool of one box. `loops` follow the pools, and keep pinned models loaded."""

    def __init__(self, settings: Settings, broker: Broker, names: Names, models: Models) -> None:
        self._box, self._home, self._models = settings.cluster.box_name, settings.cluster.pool, models
        self._load_s = settings.limits.load_wait_s
        self._shared = Shared(broker, names.pools, "pools", read_pools, write_pools, Pools())
        self._shared.on_change = self._changed
        self._more, self._seldom = asyncio.Event(), Seldom(log)
        self.pool = self._home
        self.on_change: Callable[[], None] = lambda: None
        """The box belongs to another pool from now on."""

    @property
    def loops(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """What runs as long as the bridge."""
        return self._shared.run, self._pin

    def _changed(self) -> None:
        pool = self._shared.value.of(self._box) or self._home
        if pool != self.pool:
            log.info("this box belongs to the pool %s from now on", pool)
            self.pool = pool
            self.on_change()
        self._more.set()

    @property
    def pinned(self) -> Sequence[str]:
        """Models that the pool of this box keeps loaded."""
        pool = self._shared.value.pools.get(self.pool)
        return pool.spec.pinned_models if pool is not None and self._box in pool.boxes else ()

    async def _pin(self) -> None:
        while True:
            self._more.clear()
            for model in list(self.pinned):
                # A load takes minutes, and the box may have left the pool meanwhile.
                if model in self.pinned:
                    await self._load(model)
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._more.wait()
            except TimeoutError:
                continue

    async def _load(self, model: str) -> None:
        failed = f"pinned model {model:.100} is not loaded"
        try:
            entry = self._models.find(model)
            await self._models.ensure_loaded(entry.id, deadline.after(self._load_s))
            self._seldom.over(failed)
        except PenstockError as error:
            self._seldom.warning(failed, error.message)
