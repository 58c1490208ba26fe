"""The pools of a cluster as one value of a bucket: gateways change the value, gateways and bridges follow the value.

A pool reserves boxes for the requests that name the pool. All pools are one value, so that no box is ever given to two
pools: whoever changes the value names the revision that the change was made from.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ipc.errors import ProtocolError

VERSION = 1
LEASE_S = 1200
MOST_LEASE_S = 31_536_000
MOST_POOLS = 256
MOST_PROFILES = 64
MOST_PINNED = 64
MOST_BOXES = 100_000
DEFAULT = "default"

PoolName = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,63}\Z", description="1 to 63 of `a-z`, `0-9` and `-`.")
]
Bundle = Annotated[
    str, msgspec.Meta(pattern=r"^[a-z0-9-]{0,63}\Z", description="As `PoolName`, or empty for any bundle.")
]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_BOXES)]
Profile = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\Z")]
Counts = Annotated[dict[Profile, Count], msgspec.Meta(max_length=MOST_PROFILES)]


class PoolSpec(msgspec.Struct, frozen=True):
    """What a caller asked for. `gpus`: boxes by machine profile that make the pool active; `gpu_caps`: the most boxes.

    `queue_pool` is the pool of settings (`cluster.pool`) whose boxes the pool may get, `bundle` "" stands for any.
    """

    name: PoolName
    gpus: Counts = {}
    gpu_caps: Counts = {}
    bundle: Bundle = ""
    ttl_seconds: Annotated[int, msgspec.Meta(ge=1, le=MOST_LEASE_S)] = LEASE_S
    minimum_worker_count: Count = 0
    pinned_models: Annotated[list[str], msgspec.Meta(max_length=MOST_PINNED)] = []
    queue_pool: PoolName = DEFAULT

    def room(self, profile: str) -> int:
        """The most boxes of a machine profile that the pool gets: its cap, else the count that it needs."""
        return self.gpu_caps.get(profile, self.gpus.get(profile, 0))


class Pool(msgspec.Struct, frozen=True):
    """A pool with its boxes. `created_at`, `renewed_at`: Unix seconds, for readers; no program decides by them.

    `life` is a random id of this pool under its name, `renewals` grows with each renewal.
    """

    spec: PoolSpec
    life: str
    created_at: float
    renewed_at: float
    renewals: int = 0
    boxes: list[str] = []


class Pools(msgspec.Struct, frozen=True):
    """All pools by name, the oldest first."""

    v: int = VERSION
    pools: dict[PoolName, Pool] = {}

    def of(self, box: str) -> str:
        """The pool that a box belongs to, empty for none."""
        return next((name for name, pool in self.pools.items() if box in pool.boxes), "")


_decoder = msgspec.msgpack.Decoder(Pools)
_encoder = msgspec.msgpack.Encoder()


def read_pools(data: bytes) -> Pools:
    """The value of the bucket. Raises `ProtocolError`."""
    try:
        pools = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"undecodable pools: {error}") from error
    if pools.v != VERSION:
        raise ProtocolError(f"pools of version {pools.v}, expected {VERSION}")
    return pools


def write_pools(pools: Pools) -> bytes:
    """The bytes of the value."""
    return _encoder.encode(pools)
