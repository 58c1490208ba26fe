"""Deaths of brokers while gateways write stored rows: what was acknowledged stays, once; all else is told as away.

Two gateways of this process write over three real brokers. Each write adds a row of its own and counts one up, so that
a lost, a doubled and a torn write each leave another sum.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import nats
import pytest

from frontend.cluster.broker import Broker as Connection
from frontend.cluster.lives import GatewayLives
from frontend.cluster.place import ClusterPlace
from frontend.cluster.rows import SharedRows
from ipc.settings import Cluster, load
from ipc.store.store import StoreAway
from ipc.wire.cluster_names import Names
from tests.harness.broker import PATIENCE_S, Broker, three_brokers
from tests.harness.server import eventually

SCHEMA = "CREATE TABLE IF NOT EXISTS things (id TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;"
BUCKET = "penstock_agents_things-1"
SUM = "sum"


class Gateway:
    """The rows of one gateway, and what its writes have come to."""

    def __init__(self, root: Path, name: str, urls: Sequence[str]) -> None:
        cluster, self.name = Cluster(urls=tuple(urls)), name
        self.broker = Connection(cluster, name)
        lives = GatewayLives(self.broker, Names(), cluster, name)
        settings = load(None, {"run.dir": str(root / name)})
        self.place = ClusterPlace(settings, self.broker, Names(), lives, 0)
        self.rows: SharedRows = self.place.rows("things-1.db", SCHEMA, {"things": ("id",)})
        self.acknowledged: dict[str, int] = {}
        """The sum that each write has made."""
        self.refused: set[str] = set()

    async def write(self, number: int) -> bool:
        """Add a row, and one to the sum; whether the write was acknowledged."""
        id_ = f"{self.name} {number}"

        def add(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT OR IGNORE INTO things VALUES (?, 0)", (SUM,))
            connection.execute("UPDATE things SET size = size + 1 WHERE id = ?", (SUM,))
            connection.execute("INSERT INTO things VALUES (?, 1)", (id_,))
            return int(connection.execute("SELECT size FROM things WHERE id = ?", (SUM,)).fetchone()[0])

        try:
            self.acknowledged[id_] = await self.rows.write(add)
        except StoreAway as away:
            assert away.retry_after_s, "clients hear when to come again"
            self.refused.add(id_)
            return False
        return True

    async def all(self) -> dict[str, int]:
        """All rows."""
        return dict(await self.rows.read(lambda each: each.execute("SELECT id, size FROM things").fetchall()))


class Cluster3:
    """Three brokers and two gateways that write for ever."""

    def __init__(self, brokers: Sequence[Broker], gateways: Sequence[Gateway]) -> None:
        self.brokers, self.gateways = brokers, gateways

    def acknowledged(self) -> int:
        """Writes so far."""
        return sum(len(each.acknowledged) for each in self.gateways)

    def refused(self) -> int:
        """Refused writes so far."""
        return sum(len(each.refused) for each in self.gateways)

    async def more(self, count: int, what: str) -> None:
        """Wait until each gateway has had so many writes acknowledged that began from now on."""
        before = [len(each.acknowledged) for each in self.gateways]

        async def done() -> bool:
            now = [len(each.acknowledged) for each in self.gateways]
            return all(n >= b + count for n, b in zip(now, before, strict=True))

        await eventually(done, what)

    async def leader(self) -> Broker:
        """The broker that leads the bucket."""
        found: list[str] = []

        async def known() -> bool:
            client = await nats.connect([each.url for each in self.brokers])
            try:
                info = await client.jetstream(timeout=PATIENCE_S).stream_info(f"KV_{BUCKET}")
            finally:
                await client.close()
            found[:] = [info.cluster.leader or ""] if info.cluster is not None else []
            return bool(found and found[0])

        await eventually(known, "the leader of the bucket")
        return self.brokers[int(found[0].removeprefix("b"))]

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Within the context both gateways write; behind it their last writes have ended."""
        ended = asyncio.Event()

        async def write(gateway: Gateway) -> None:
            number = 0
            while not ended.is_set():
                number += 1
                if not await gateway.write(number):
                    await asyncio.sleep(0.01)

        tasks = [asyncio.ensure_future(write(each)) for each in self.gateways]
        try:
            yield
        finally:
            ended.set()
            await asyncio.gather(*tasks)

    async def agreed(self) -> dict[str, int]:
        """The rows, once both gateways have the same."""
        found: list[dict[str, int]] = []

        async def same() -> bool:
            with suppress(StoreAway):
                found[:] = [await each.all() for each in self.gateways]
            return len(found) == 2 and found[0] == found[1]

        await eventually(same, "one content of both copies")
        return found[0]

    async def check(self, before: int = 0) -> None:
        """Nothing that was acknowledged is gone, and nothing is there twice. `before`: the sum at the beginning."""
        rows = await self.agreed()
        acknowledged = {id_: made for each in self.gateways for id_, made in each.acknowledged.items()}
        refused = {id_ for each in self.gateways for id_ in each.refused}
        total, ids = rows.pop(SUM), rows.keys()
        assert acknowledged.keys() <= ids, f"lost: {sorted(acknowledged.keys() - ids)[:9]}"
        assert ids <= acknowledged.keys() | refused
        assert len(set(acknowledged.values())) == len(acknowledged), "two writes have made the same sum"
        assert before + len(ids) <= total <= before + len(acknowledged) + len(refused)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Sequence[Broker]]:
    with three_brokers(tmp_path / "brokers") as members:
        yield members


def on_brokers(root: Path, brokers: Sequence[Broker], scene: Callable[[Cluster3], Awaitable[None]]) -> None:
    """Run a scene of two gateways."""

    async def whole() -> None:
        gateways = [Gateway(root, name, [each.url for each in brokers]) for name in ("near", "far")]
        for each in gateways:
            each.broker.start()
        cluster = Cluster3(brokers, gateways)
        try:

            async def first() -> bool:
                return await gateways[0].write(0)

            await eventually(first, "the first write")
            await scene(cluster)
        finally:
            for each in gateways:
                each.place.close()
                await each.broker.close()

    asyncio.run(whole())


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_leader_that_is_killed_in_the_midst_of_writes_loses_none_and_doubles_none(
    tmp_path: Path, brokers: Sequence[Broker], count: int
) -> None:
    async def scene(cluster: Cluster3) -> None:
        async with cluster.writing():
            for _ in range(count):
                await cluster.more(10, "writes")
                leader = await cluster.leader()
                leader.kill()
                await cluster.more(10, "writes without the leader")
                leader.start()
                await cluster.more(10, "writes with all three")
        await cluster.check()

    on_brokers(tmp_path, brokers, scene)


@pytest.mark.long
def test_without_any_broker_writes_are_refused_and_all_rows_are_there_once_brokers_are_back(
    tmp_path: Path, brokers: Sequence[Broker]
) -> None:
    async def scene(cluster: Cluster3) -> None:
        async with cluster.writing():
            await cluster.more(10, "writes")
            for each in brokers:
                each.kill()
            before = cluster.refused()

            async def refused() -> bool:
                return cluster.refused() > before + 4

            await eventually(refused, "refused writes")
            assert SUM in await cluster.gateways[0].all(), "the copy still has the rows"
            for each in brokers:
                each.start()
            await cluster.more(10, "writes with brokers again")
        await cluster.check()

    on_brokers(tmp_path, brokers, scene)


@pytest.mark.long
def test_brokers_that_come_back_empty_have_no_row_of_before_and_keep_what_is_written_then(
    tmp_path: Path, brokers: Sequence[Broker]
) -> None:
    async def scene(cluster: Cluster3) -> None:
        async with cluster.writing():
            await cluster.more(10, "writes")
        for each in brokers:
            each.kill()
        for number in range(3):
            shutil.rmtree(tmp_path / "brokers" / f"broker-{number}" / "store")
        for each in brokers:
            each.start()
        for gateway in cluster.gateways:
            gateway.acknowledged.clear()
            gateway.refused.clear()

        async def empty() -> bool:
            with suppress(StoreAway):
                return [await each.all() for each in cluster.gateways] == [{}, {}]
            return False

        await eventually(empty, "copies without rows")
        async with cluster.writing():
            await cluster.more(10, "writes to a new bucket")
        await cluster.check()

    on_brokers(tmp_path, brokers, scene)
