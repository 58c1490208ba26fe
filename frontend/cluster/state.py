"""What a gateway follows at the brokers: rows of boxes, pools, configurations, refused inputs, stored objects.

`loops` run as long as the gateway.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from frontend.cluster.broker import Broker
from frontend.cluster.bucket import Follower
from frontend.cluster.config_messages import ConfigMessages
from frontend.cluster.configs import ClusterConfigs
from frontend.cluster.directory import ClusterModels
from frontend.cluster.lives import GatewayLives
from frontend.cluster.place import ClusterPlace
from frontend.cluster.poison import SharedPoison
from frontend.cluster.pools import ClusterPools
from frontend.cluster.shared import Shared
from frontend.engine.poison import PoisonList
from ipc.metrics.cluster import ConfigResult
from ipc.settings import Settings
from ipc.wire.cluster_names import Names
from ipc.wire.cluster_pools import Pools, read_pools, write_pools

POISON_EVERY_S = 1.0


class GatewayState:
    """The state of the cluster at one gateway."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        names: Names,
        models: ClusterModels,
        router: str,
        slot: int,
    ) -> None:
        """`slot` is the number of this frontend."""
        self.poison = PoisonList(None, settings.limits.poison_ttl_s)
        shared = Shared(broker, names.pools, "pools", read_pools, write_pools, Pools())
        self.pools = ClusterPools(settings.cluster, shared, models, lambda: broker.up)
        self.configs = ClusterConfigs(broker, names, models, router)
        self._told: Counter[tuple[str, str]] = Counter()
        messages = ConfigMessages(broker, names.config_changes(), self.configs.take, self._tell)
        lives = GatewayLives(broker, names, settings.cluster, router)
        self.place = ClusterPlace(settings, broker, names, lives, slot)
        follower = Follower(broker, names, models.take, models.read)
        others = SharedPoison(broker, names, self.poison)
        own = follower.run, shared.run, self.pools.run, self._age, self.place.run, messages.run
        loops = *own, *self.configs.loops, *others.loops
        self.loops: Sequence[Callable[[], Awaitable[None]]] = loops
        models.expects, models.reserved = self.pools.has_boxes, self.pools.pool_with
        self.pools.on_read = models.homes.look

    def _tell(self, result: ConfigResult) -> None:
        self._told["config_deltas", f"message {result}"] += 1

    async def _age(self) -> None:
        """End verdicts on inputs when their time has passed."""
        while True:
            self.poison.refresh()
            await asyncio.sleep(POISON_EVERY_S)

    def counts(self) -> dict[tuple[str, str], float]:
        """For `GatewayMeter`."""
        return {**self.pools.counts(), **self.configs.counts(), **self._told}
