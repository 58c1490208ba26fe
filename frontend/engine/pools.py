"""Pools of boxes at a gateway: which boxes a pool gets, what a pool looks like to clients, and who changes pools.

1. A pool with `gpus` or `gpu_caps` gets boxes by machine profile, as many as `PoolSpec.room` says. A pool with neither
   gets one box, of any profile.
2. A box belongs to one pool at most, and stays there as long as the pool has room for it. The oldest pool chooses
   first. A box goes back when its pool is gone.
3. A pool is pending until its `gpus` are met by boxes that take work, then active; expired when nobody renews it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.engine.boxes import by_boxes, gpu_of
from frontend.engine.interface import BoxView, Models
from ipc.wire.cluster_pools import Pool, PoolSpec


@dataclass(frozen=True, slots=True)
class Member:
    """A box as pools see it. `home` is the pool of its settings, `pool` the one that it takes work of now."""

    name: str
    home: str
    pool: str
    bundle: str
    profile: str
    healthy: bool

    def shown(self) -> dict[str, str]:
        """The box in the words of SIE."""
        return {"name": self.name, "url": "", "gpu": self.profile, "bundle": self.bundle}


def members_of(directory: Models) -> list[Member]:
    """Boxes that have told what they are, by name."""
    by_box = by_boxes(directory)

    def member(box: BoxView) -> Member:
        profile = gpu_of(box, by_box[box.name])
        return Member(box.name, box.home or box.pool, box.pool, box.bundle, profile, box.healthy)

    return [member(box) for box in directory.boxes() if box.name in by_box]


def assigned(
    pools: Mapping[str, Pool], members: Sequence[Member], gone: Collection[str]
) -> dict[str, list[str]]:
    """The boxes of each pool by name. Boxes in `gone` leave; other boxes that are not among `members` stay."""
    known = {member.name: member for member in members}
    standing = {name: _kept(pool, known, gone) for name, pool in pools.items()}
    taken = {box for boxes in standing.values() for box in boxes}
    for name, pool in pools.items():
        for member in members:
            if member.name in taken or not member.healthy or not _fits(pool.spec, member):
                continue
            if _has_room(pool.spec, member, standing[name], known):
                standing[name].append(member.name)
                taken.add(member.name)
    return standing


def _kept(pool: Pool, known: Mapping[str, Member], gone: Collection[str]) -> list[str]:
    boxes: list[str] = []
    for box in pool.boxes:
        member = known.get(box)
        if box in gone or (member is not None and not _fits(pool.spec, member)):
            continue
        if member is None or _has_room(pool.spec, member, boxes, known):
            boxes.append(box)
    return boxes


def _fits(spec: PoolSpec, member: Member) -> bool:
    return member.home == spec.queue_pool and spec.bundle in ("", member.bundle)


def _has_room(spec: PoolSpec, member: Member, boxes: Sequence[str], known: Mapping[str, Member]) -> bool:
    if not (spec.gpus or spec.gpu_caps):
        return not boxes
    profiles = Counter(known[box].profile for box in boxes if box in known)
    return profiles[member.profile] < spec.room(member.profile)


def shown(name: str, pool: Pool, members: Sequence[Member], expired: bool) -> dict[str, Any]:
    """A pool as clients see it."""
    spec = pool.spec
    boxes = [member for member in members if member.name in pool.boxes and member.healthy]
    having = Counter(member.profile for member in boxes)
    met = all(having[profile] >= count for profile, count in spec.gpus.items())
    return {
        "name": name,
        "spec": {
            "name": name,
            "queue_pool": spec.queue_pool,
            "gpus": spec.gpus,
            "gpu_caps": spec.gpu_caps,
            "bundle": spec.bundle or None,
            "ttl_seconds": spec.ttl_seconds,
            "minimum_worker_count": spec.minimum_worker_count,
            "pinned_models": spec.pinned_models,
        },
        "status": {
            "state": "expired" if expired else "active" if met else "pending",
            "assigned_workers": [member.shown() for member in boxes],
            "created_at": pool.created_at,
            "last_renewed": pool.renewed_at,
        },
    }


class Pools(ABC):
    """The pools of a cluster, for the routes of a gateway.

    Changes raise `QueueUnavailable` where no broker keeps the pools; pools that were read once are still shown then.
    """

    @abstractmethod
    def all(self) -> list[dict[str, Any]]:
        """All pools as clients see them, by name; also those of settings that have boxes.

        Raises `QueueUnavailable` before the pools were read.
        """

    @abstractmethod
    def find(self, name: str) -> dict[str, Any]:
        """One pool. Raises `PoolNotFound`, and `QueueUnavailable` before the pools were read."""

    @abstractmethod
    async def put(self, spec: PoolSpec) -> tuple[dict[str, Any], bool]:
        """Make a pool, or give an old one these values and a new lease; returns the pool and whether it is new.

        Raises `Forbidden` for the pool of settings, `InvalidInput` for a value that the cluster does not know, and
        `StateFull`.
        """

    @abstractmethod
    async def renew(self, name: str) -> dict[str, Any]:
        """Begin the lease anew. Raises `PoolNotFound`."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Give the boxes of a pool back. Raises `PoolNotFound`, and `Forbidden` for the pool of settings."""
