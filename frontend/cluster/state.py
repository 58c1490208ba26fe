"""What a gateway follows at the brokers: rows of boxes, pools, configurations. `loops` run as long as the gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from frontend.cluster.broker import Broker
from frontend.cluster.bucket import Follower
from frontend.cluster.configs import ClusterConfigs
from frontend.cluster.directory import ClusterModels
from frontend.cluster.pools import ClusterPools
from frontend.cluster.shared import Shared
from ipc.settings import Cluster
from ipc.wire.cluster_names import Names
from ipc.wire.cluster_pools import Pools, read_pools, write_pools


class GatewayState:
    """The state of the cluster at one gateway."""

    def __init__(
        self, cluster: Cluster, broker: Broker, names: Names, models: ClusterModels, router: str
    ) -> None:
        shared = Shared(broker, names.pools, "pools", read_pools, write_pools, Pools())
        self.pools = ClusterPools(cluster, shared, models, lambda: broker.up)
        self.configs = ClusterConfigs(broker, names, models, router)
        follower = Follower(broker, names, models.take, models.read)
        loops = follower.run, shared.run, self.pools.run, *self.configs.loops
        self.loops: Sequence[Callable[[], Awaitable[None]]] = loops
        models.expects = self.pools.has_boxes

    def counts(self) -> dict[tuple[str, str], float]:
        """For `GatewayMeter`."""
        return {**self.pools.counts(), **self.configs.counts()}
