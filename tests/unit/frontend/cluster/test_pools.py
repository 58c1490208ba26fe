"""Leases and boxes of pools at one gateway and at two. The clock is moved by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.cluster.pools import GONE_S, ClusterPools
from frontend.engine.interface import BoxView, WorkerView
from frontend.engine.pools import Member, assigned
from ipc.catalog.entries import Catalog
from ipc.errors import PenstockError, PoolNotFound, ProtocolError, StateFull
from ipc.settings import Cluster
from ipc.wire.cluster_pools import MOST_POOLS, Pool, Pools, PoolSpec, read_pools, write_pools
from ipc.wire.messages import Credits
from tests.fakes.shared import Cell, SharedCopy


class Boxes:
    """The boxes that a gateway knows; `profiles` by name."""

    def __init__(self, **profiles: str) -> None:
        self.profiles, self.catalog = profiles, Catalog(())
        self.down: set[str] = set()
        self.taking: dict[str, str] = {}

    def boxes(self) -> list[BoxView]:
        return [
            BoxView(
                name,
                self.taking.get(name, "default"),
                "default",
                name not in self.down,
                False,
                profile=profile,
                home="default",
            )
            for name, profile in sorted(self.profiles.items())
        ]

    def workers(self) -> list[WorkerView]:
        none = Credits(0, 0, 0.0)
        return [
            WorkerView(f"{name}/worker-0", 0, "ready", True, True, "cpu", 1, {}, none, None, box=name)
            for name in self.profiles
        ]


class Stage:
    """One gateway of some that share pools."""

    def __init__(self, cell: Cell | None = None, **profiles: str) -> None:
        self.now_ns, self.boxes = 10**12, Boxes(**profiles)
        self.cell = cell or Cell()
        self.copy = SharedCopy(self.cell)
        self.removed: list[str] = []
        self.pools = ClusterPools(
            Cluster(),
            self.copy,  # type: ignore[arg-type]
            self.boxes,  # type: ignore[arg-type]
            lambda: True,
            lambda: self.now_ns,
        )
        self.pools.on_removed = self.removed.append

    def make(self, name: str, **spec: Any) -> dict[str, Any]:
        return asyncio.run(self.pools.put(PoolSpec(name, **spec)))[0]

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.copy.read()
        asyncio.run(self.pools.look())

    def boxes_of(self, name: str) -> list[str]:
        return self.cell.value.pools[name].boxes


def test_a_lease_ends_when_nobody_renews_it_and_its_boxes_go_back() -> None:
    stage = Stage(a="l4", b="l4")
    stage.make("p", gpus={"l4": 1}, ttl_seconds=60)
    stage.pass_s(59)
    asyncio.run(stage.pools.renew("p"))
    stage.pass_s(59)
    assert stage.boxes_of("p") == ["a"] and stage.pools.find("p")["status"]["state"] == "active"
    stage.now_ns += 2 * 10**9
    assert stage.pools.find("p")["status"]["state"] == "expired"
    with pytest.raises(PoolNotFound):
        asyncio.run(stage.pools.renew("p"))
    stage.pass_s(0)
    assert stage.removed == ["p"] and not stage.cell.value.pools
    assert stage.pools.events["expired"] == 1


def test_a_pool_that_another_gateway_renewed_meanwhile_is_not_removed() -> None:
    one = Stage(a="l4")
    other = Stage(one.cell, a="l4")
    one.make("p", ttl_seconds=60)
    other.pass_s(0)
    other.now_ns += 50 * 10**9
    asyncio.run(other.pools.renew("p"))
    # This gateway has not heard of the renewal, and finds out when it removes the pool.
    one.now_ns += 61 * 10**9
    asyncio.run(one.pools.look())
    assert "p" in one.cell.value.pools and not one.removed
    one.pass_s(59)
    assert "p" in one.cell.value.pools
    one.pass_s(2)
    assert "p" not in one.cell.value.pools
    other.pass_s(0)
    assert other.removed == ["p"]


def test_a_pool_that_was_made_anew_under_its_name_has_a_lease_of_its_own() -> None:
    one = Stage(a="l4")
    other = Stage(one.cell, a="l4")
    one.make("p", ttl_seconds=60)
    one.now_ns += 50 * 10**9
    other.copy.read()
    asyncio.run(other.pools.remove("p"))
    other.make("p", ttl_seconds=60)
    one.pass_s(20)
    assert "p" in one.cell.value.pools


def test_two_gateways_never_give_a_box_to_two_pools() -> None:
    one = Stage(a="l4")
    other = Stage(one.cell, a="l4")

    async def both() -> None:
        await asyncio.gather(
            one.pools.put(PoolSpec("p", gpus={"l4": 1})), other.pools.put(PoolSpec("q", gpus={"l4": 1}))
        )
        for _ in range(3):
            one.copy.read()
            other.copy.read()
            await asyncio.gather(one.pools.look(), other.pools.look())

    asyncio.run(both())
    assert sorted([*one.boxes_of("p"), *one.boxes_of("q")]) == ["a"]


def test_two_gateways_that_agree_write_once() -> None:
    one = Stage(a="l4", b="l4")
    other = Stage(one.cell, a="l4", b="l4")
    one.make("p", gpus={"l4": 2})
    written = one.cell.revision
    for stage in (one, other, one, other):
        stage.pass_s(1)
    assert one.cell.revision == written


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "dead"])
def test_a_box_that_is_away_for_a_short_time_keeps_its_pool_and_one_that_is_gone_leaves_it(
    is_known: bool,
) -> None:
    stage = Stage(a="l4", b="l4", c="l4")
    stage.make("p", gpus={"l4": 2})
    assert stage.boxes_of("p") == ["a", "b"]
    if is_known:
        stage.boxes.down.add("a")
    else:
        del stage.boxes.profiles["a"]
    stage.pass_s(1)
    stage.pass_s(GONE_S - 1)
    assert "a" in stage.boxes_of("p")
    stage.pass_s(2)
    assert stage.boxes_of("p") == ["b", "c"]
    stage.boxes.down.clear()
    stage.boxes.profiles["a"] = "l4"
    stage.pass_s(1)
    assert stage.boxes_of("p") == ["b", "c"], "who is there stays"


def test_a_gateway_that_has_just_begun_takes_no_box_away() -> None:
    one = Stage(a="l4")
    one.make("p", gpus={"l4": 1})
    young = Stage(one.cell)
    young.pass_s(1)
    assert one.boxes_of("p") == ["a"]


def member(name: str, profile: str = "l4", **fields: Any) -> Member:
    return Member(
        name,
        **{"home": "default", "pool": "default", "bundle": "default", **fields},
        profile=profile,
        healthy=True,
    )


@pytest.mark.parametrize(
    ("spec", "boxes"),
    [
        ({}, ["a"]),
        ({"gpus": {"l4": 2}}, ["a", "b"]),
        ({"gpus": {"l4": 1}, "gpu_caps": {"l4": 3}}, ["a", "b", "c"]),
        ({"gpu_caps": {"cpu": 1}}, ["d"]),
        ({"gpus": {"l4": 0}}, []),
        ({"gpus": {"l4": 1, "cpu": 1}}, ["a", "d"]),
        ({"gpus": {"l4": 9}, "bundle": "other"}, ["c"]),
        ({"gpus": {"l4": 9}, "queue_pool": "apart"}, ["e"]),
        ({"gpus": {"h100": 1}}, []),
    ],
)
def test_a_pool_gets_the_boxes_that_it_asks_for(spec: dict[str, Any], boxes: list[str]) -> None:
    members = [
        member("a"),
        member("b"),
        member("c", bundle="other"),
        member("d", "cpu"),
        member("e", home="apart"),
    ]
    pool = Pool(PoolSpec("p", **spec), "1", 0.0, 0.0)
    assert assigned({"p": pool}, members, ())["p"] == boxes


def test_a_pool_that_is_made_smaller_gives_boxes_back() -> None:
    pool = Pool(PoolSpec("p", gpus={"l4": 1}), "1", 0.0, 0.0, boxes=["b", "a"])
    assert assigned({"p": pool}, [member("a"), member("b")], ())["p"] == ["b"]


def test_the_oldest_pool_chooses_first() -> None:
    pools = {name: Pool(PoolSpec(name, gpus={"l4": 1}), name, 0.0, 0.0) for name in ("z", "y")}
    assert assigned(pools, [member("a")], ()) == {"z": ["a"], "y": []}


def test_there_is_a_bound_for_pools() -> None:
    pool = Pool(PoolSpec("x"), "1", 0.0, 0.0)
    stage = Stage(Cell(Pools(pools={f"p{number}": pool for number in range(MOST_POOLS)})))
    with pytest.raises(StateFull):
        stage.make("one-more")


def test_a_pinned_model_of_a_cluster_without_boxes_is_not_taken_for_a_mistake() -> None:
    stage = Stage()

    def find(model: str) -> None:
        raise PenstockError("none yet")

    stage.boxes.find = find  # type: ignore[attr-defined]
    with pytest.raises(PenstockError, match="none yet"):
        stage.make("p", pinned_models=["m"])


def test_the_queue_of_a_pool_ends_when_its_last_box_has_left() -> None:
    stage, left = Stage(a="l4"), list[str]()
    stage.pools.on_left = left.append
    stage.make("p", gpus={"l4": 1})
    stage.boxes.taking["a"] = "p"
    asyncio.run(stage.pools.remove("p"))
    stage.pools._end_queues()
    assert stage.removed == ["p"] and not left
    with pytest.raises(PoolNotFound):
        stage.pools.find("p")
    stage.boxes.taking.clear()
    stage.pools._end_queues()
    stage.pools._end_queues()
    assert left == ["p"]


def test_demand_of_pools_is_counted_by_machine_profile() -> None:
    stage = Stage()
    stage.make("p", gpus={"l4": 2})
    stage.make("q", gpus={"l4": 1, "h100": 1}, bundle="big")
    counts = stage.pools.counts()
    assert counts["leased", "l4 default"] == 2 and counts["leased", "h100 big"] == 1
    assert counts["pool_events", "created"] == 2


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x90", b"\x81" * 5000, write_pools(Pools(v=9)), b"\x82\xa1v\x01\xa5pools\x81\xa1p\x01"],
)
def test_bytes_that_are_no_pools_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_pools(data)


def test_pools_are_read_as_they_were_written() -> None:
    pools = Pools(pools={"p": Pool(PoolSpec("p", gpus={"l4": 1}), "1", 1.0, 2.0, 3, ["a"])})
    assert read_pools(write_pools(pools)) == pools and pools.of("a") == "p" and pools.of("b") == ""


def test_the_watch_goes_on_after_an_error_of_the_brokers() -> None:
    stage = Stage(a="l4")
    stage.make("p", gpus={"l4": 1}, ttl_seconds=60)
    stage.now_ns += 61 * 10**9
    stage.cell.up = False

    async def scene() -> None:
        task = asyncio.create_task(stage.pools.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert "p" in stage.cell.value.pools
        stage.cell.up = True
        stage.pools._more.set()
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(scene())
    assert not stage.cell.value.pools


def test_boxes_of_settings_are_shown_as_their_pool() -> None:
    stage = Stage(a="l4")
    stage.boxes.catalog = SimpleNamespace()  # type: ignore[assignment]
    assert [box["name"] for box in stage.pools.find("default")["status"]["assigned_workers"]] == ["a"]
