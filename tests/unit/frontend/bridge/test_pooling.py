"""The pool of a box, and the models that the pool pins, without a broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.bridge.pooling import Membership
from frontend.cluster.broker import Broker
from ipc.errors import ModelNotFound
from ipc.settings import Cluster, Settings
from ipc.wire.cluster_names import Names
from ipc.wire.cluster_pools import Pool, Pools, PoolSpec


class Models:
    """Models that load when the test lets them; `no/such` is not known."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.free = asyncio.Semaphore(0)

    def find(self, model: str) -> Any:
        if model == "no/such":
            raise ModelNotFound("no such model")
        return SimpleNamespace(id=model)

    async def ensure_loaded(self, model: str, deadline_ns: int) -> None:
        self.begun.append(model)
        await self.free.acquire()


class Stage:
    """The membership of the box `a`, whose pool of settings is `home`."""

    def __init__(self) -> None:
        cluster = Cluster(urls=("nats://127.0.0.1:1",), box="a", pool="home")
        self.models, self.aims = Models(), list[str]()
        self.one = Membership(Settings(cluster=cluster), Broker(cluster, "test"), Names(), self.models)  # type: ignore[arg-type]
        self.one.on_change = lambda: self.aims.append(self.one.pool)

    def pools(self, **pinned: list[str]) -> None:
        """These pools are read, in the first of which the box is."""
        pools = {
            name: Pool(PoolSpec(name, pinned_models=models), "1", 0.0, 0.0, boxes=[] if at else ["a"])
            for at, (name, models) in enumerate(pinned.items())
        }
        self.one._shared._take(Pools(pools=pools), 1)

    async def turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_a_box_belongs_to_the_pool_that_has_it_and_else_to_that_of_its_settings() -> None:
    stage = Stage()
    assert stage.one.pool == "home"
    stage.pools(p=["m"], q=["n"])
    assert stage.one.pool == "p" and stage.one.pinned == ["m"]
    stage.pools(q=["n"], p=["m"])
    stage.pools()
    assert stage.aims == ["p", "q", "home"] and not stage.one.pinned


@pytest.mark.parametrize("after", [{"q": ["n"]}, {}])
def test_a_box_that_left_a_pool_loads_nothing_more_of_it(after: dict[str, list[str]]) -> None:
    async def scene() -> None:
        stage = Stage()
        stage.pools(p=["no/such", "m1", "m2", "m3"])
        pinning = asyncio.create_task(stage.one._pin())
        await stage.turn()
        assert stage.models.begun == ["m1"]
        stage.pools(**after)
        for _ in range(4):
            stage.models.free.release()
        await stage.turn()
        assert stage.models.begun == ["m1", *after.get("q", ())]
        pinning.cancel()

    asyncio.run(scene())
