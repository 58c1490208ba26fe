"""The pools of a cluster as one gateway keeps them: leases, boxes, and what callers ask for.

1. All pools are one shared value. Every gateway gives boxes to pools by the same rule, and whoever is quickest writes.
2. A lease ends by the clock of a gateway: so long after it has seen the last renewal. The gateway that finds a lease at
   its end removes the pool, unless the pool was renewed meanwhile.
3. A box that a gateway has not heard of for `GONE_S` leaves its pool. Time without a broker does not count.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.cluster.boxes import SHOWN_S
from frontend.cluster.shared import Shared
from frontend.engine import pools as rules
from frontend.engine.boxes import BUNDLE, known_profiles
from frontend.engine.interface import Models
from ipc.errors import Forbidden, InvalidInput, PenstockError, PoolNotFound, QueueUnavailable, StateFull
from ipc.logs import Seldom
from ipc.settings import Cluster
from ipc.wire.cluster_pools import DEFAULT, MOST_POOLS, Pool, Pools, PoolSpec

log = logging.getLogger(__name__)

EVERY_S = 0.5
GONE_S = SHOWN_S
_UNASSIGNED = "boxes cannot be given to pools"


@dataclass(frozen=True, slots=True)
class Lease:
    """When this gateway saw the last renewal of a pool (CLOCK_MONOTONIC nanoseconds); `life` tells pools apart."""

    life: str
    renewals: int
    since_ns: int


class ClusterPools(rules.Pools):
    """See `frontend.engine.pools.Pools`."""

    def __init__(
        self,
        cluster: Cluster,
        shared: Shared[Pools],
        directory: Models,
        is_up: Callable[[], bool],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`is_up`: whether this gateway has a broker."""
        self._cluster, self._shared, self._directory = cluster, shared, directory
        self._is_up, self._now_ns = is_up, now_ns
        self._leases: dict[str, Lease] = {}
        self._missing: dict[str, int] = {}
        self._seldom = Seldom(log)
        self._more = asyncio.Event()
        self.events: Counter[str] = Counter()
        """What this gateway did with pools."""
        self.on_removed: Callable[[str], None] = lambda name: None
        """Told of a pool that is there no more, whoever removed the pool."""
        self.on_left: Callable[[str], None] = lambda name: None
        """Told when the last box has left such a pool, so that nobody makes its queue again."""
        self.on_read: Callable[[], None] = lambda: None
        """Told after each change of the pools."""
        self._left: set[str] = set()
        shared.on_change = self._changed

    def has_boxes(self, name: str) -> bool:
        """Whether a pool was given a box, which may have yet to hear of that."""
        pool = self._shared.value.pools.get(name)
        return pool is not None and bool(pool.boxes)

    def pool_with(self, box: str) -> str:
        """The pool that was given a box, empty for none."""
        pools = self._shared.value.pools.items()
        return next((name for name, pool in pools if box in pool.boxes), "")

    def counts(self) -> dict[tuple[str, str], float]:
        """For `GatewayMeter`: what was done with pools, and boxes that pools need, by machine profile and bundle."""
        counts: Counter[tuple[str, str]] = Counter()
        for event, count in self.events.items():
            counts["pool_events", event] = count
        for pool in self._shared.value.pools.values():
            for profile, boxes in pool.spec.gpus.items():
                counts["leased", f"{profile} {pool.spec.bundle or BUNDLE}"] += boxes
        return dict(counts)

    @property
    def _own(self) -> set[str]:
        return {DEFAULT, self._cluster.pool}

    def _changed(self) -> None:
        """Another value was read: begin the leases of renewed pools, tell of pools that are gone."""
        now_ns, pools = self._now_ns(), self._shared.value.pools
        gone = self._leases.keys() - pools.keys()
        for name in gone:
            del self._leases[name]
            self._left.add(name)
            self.on_removed(name)
        for name, pool in pools.items():
            lease = self._leases.get(name)
            if lease is None or (lease.life, lease.renewals) != (pool.life, pool.renewals):
                self._leases[name] = Lease(pool.life, pool.renewals, now_ns)
        self.on_read()
        self._more.set()

    def _is_expired(self, name: str, pool: Pool) -> bool:
        lease = self._leases.get(name)
        if lease is None or (lease.life, lease.renewals) != (pool.life, pool.renewals):
            return False
        return self._now_ns() - lease.since_ns > pool.spec.ttl_seconds * 1e9

    async def run(self) -> None:
        """Keep leases and boxes for ever."""
        while True:
            if self._is_up():
                self._end_queues()
                try:
                    await self.look()
                    self._seldom.over(_UNASSIGNED)
                except PenstockError as error:
                    self._seldom.warning(_UNASSIGNED, error.message)
            else:
                self._missing.clear()
            self._more.clear()
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._more.wait()
            except TimeoutError:
                continue

    def _end_queues(self) -> None:
        """Tell of removed pools whose boxes have gone, which takes them a moment."""
        taken = {box.pool for box in self._directory.boxes()} | self._shared.value.pools.keys()
        gone, self._left = self._left - taken, self._left & taken - self._shared.value.pools.keys()
        for name in gone:
            self.on_left(name)

    async def look(self) -> None:
        """Remove pools whose lease has ended, and give boxes to pools. Raises `QueueUnavailable`."""
        value = self._shared.value
        if not value.pools:
            return
        gone = self._gone(value)
        if self._kept(value, gone) == value:
            return

        def change(now: Pools) -> Pools:
            nonlocal value
            value = now
            return self._kept(now, gone)

        after = await self._shared.change(change)
        self._note(value, after)

    def _gone(self, value: Pools) -> set[str]:
        """Boxes of pools without a sign of life for `GONE_S`."""
        now_ns, alive = self._now_ns(), {box.name for box in self._directory.boxes() if box.alive}
        boxes = {box for pool in value.pools.values() for box in pool.boxes}
        self._missing = {box: self._missing.get(box, now_ns) for box in boxes - alive}
        return {box for box, since_ns in self._missing.items() if now_ns - since_ns > GONE_S * 1e9}

    def _kept(self, value: Pools, gone: set[str]) -> Pools:
        """The pools as they should be by now."""
        pools = {name: pool for name, pool in value.pools.items() if not self._is_expired(name, pool)}
        boxes = rules.assigned(pools, rules.members_of(self._directory), gone)
        return _with(
            value,
            {name: msgspec.structs.replace(pool, boxes=boxes[name]) for name, pool in pools.items()},
        )

    def _note(self, before: Pools, after: Pools) -> None:
        """Count what a change did with pools and boxes, and write it into the log."""
        for name in before.pools.keys() - after.pools.keys():
            self.events["expired"] += 1
            log.info("pool %s: nobody renewed the lease; its boxes go back", name)
        for name, pool in after.pools.items():
            had, has = set(before.pools[name].boxes), set(pool.boxes)
            for event, boxes in (("assigned", has - had), ("released", had - has)):
                self.events[event] += len(boxes)
                if boxes:
                    log.info("pool %s: boxes %s: %s", name, event, ", ".join(sorted(boxes)))

    def all(self) -> list[dict[str, Any]]:
        self._check_read()
        return self._all()

    def _check_read(self) -> None:
        if not self._shared.is_read:
            raise QueueUnavailable("the brokers have not told the pools yet", retry_after_s=1)

    def _all(self) -> list[dict[str, Any]]:
        members = rules.members_of(self._directory)
        value = self._shared.value.pools
        made = {name: self._shown(name, pool, members) for name, pool in value.items()}
        # A box takes work of a removed pool until it hears of the removal: only pools of settings are shown by boxes.
        names = {member.pool for member in members if member.pool == member.home} | self._own
        return [made.get(name) or self._settled(name, members) for name in sorted(names | made.keys())]

    def find(self, name: str) -> dict[str, Any]:
        found = next((pool for pool in self._all() if pool["name"] == name), None)
        if found is None:
            self._check_read()
            raise PoolNotFound(f"pool {name[:64]!a} is not known")
        return found

    def _shown(self, name: str, pool: Pool, members: list[rules.Member]) -> dict[str, Any]:
        return rules.shown(name, pool, members, self._is_expired(name, pool))

    def _settled(self, name: str, members: list[rules.Member]) -> dict[str, Any]:
        """A pool of settings (`cluster.pool`), which nobody has made and whose lease does not end."""
        boxes = [member.name for member in members if member.pool == name]
        return rules.shown(
            name, Pool(PoolSpec(name, queue_pool=name), "", 0.0, 0.0, boxes=boxes), members, False
        )

    async def put(self, spec: PoolSpec) -> tuple[dict[str, Any], bool]:
        self._check(spec)
        is_new, now = False, time.time()

        def change(value: Pools) -> Pools:
            nonlocal is_new
            old = value.pools.get(spec.name)
            is_new = old is None or self._is_expired(spec.name, old)
            if old is None and len(value.pools) >= MOST_POOLS:
                raise StateFull(f"pools: there are {len(value.pools)}, and {MOST_POOLS} are allowed")
            if old is None or is_new:
                pool = Pool(spec, secrets.token_hex(8), now, now)
            else:
                pool = msgspec.structs.replace(old, spec=spec, renewed_at=now, renewals=old.renewals + 1)
            return _with(value, {**value.pools, spec.name: pool})

        await self._shared.change(change)
        self.events["created" if is_new else "updated"] += 1
        await self.look()
        return self.find(spec.name), is_new

    def _check(self, spec: PoolSpec) -> None:
        if spec.name in self._own:
            raise Forbidden(
                f"name: {spec.name!r} is the pool of all boxes that no other pool has; take another name"
            )
        for model in spec.pinned_models:
            try:
                self._directory.find(model)
            except PenstockError as error:
                if error.status != 404:
                    raise
                raise InvalidInput(f"pinned_models: {error.message}") from error
        known = known_profiles(self._cluster.profiles, self._directory)
        for field, counts in (("gpus", spec.gpus), ("gpu_caps", spec.gpu_caps)):
            unknown = [profile for profile in counts if self._cluster.profiles and profile not in known]
            if unknown:
                raise InvalidInput(
                    f"{field}: {unknown[0]!r}: the profiles of the cluster are {', '.join(known)}"
                )

    async def renew(self, name: str) -> dict[str, Any]:
        if name in self._own:
            return self.find(name)

        def change(value: Pools) -> Pools:
            pool = self._live(value, name)
            renewed = msgspec.structs.replace(pool, renewed_at=time.time(), renewals=pool.renewals + 1)
            return _with(value, {**value.pools, name: renewed})

        await self._shared.change(change)
        self.events["renewed"] += 1
        return self.find(name)

    def _live(self, value: Pools, name: str) -> Pool:
        pool = value.pools.get(name)
        if pool is None or self._is_expired(name, pool):
            raise PoolNotFound(f"pool {name[:64]!a} is not known")
        return pool

    async def remove(self, name: str) -> None:
        if name in self._own:
            raise Forbidden(
                f"pool {name!r} is the pool of all boxes that no other pool has; nobody can remove it"
            )

        def change(value: Pools) -> Pools:
            self._live(value, name)
            return _with(value, {each: pool for each, pool in value.pools.items() if each != name})

        await self._shared.change(change)
        self.events["deleted"] += 1


def _with(value: Pools, pools: dict[str, Pool]) -> Pools:
    return msgspec.structs.replace(value, pools=pools)
