"""The brokers of the tests are real: JetStream works, deaths and returns are seen, three form a cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import nats
from nats.errors import TimeoutError as NoItem
from nats.js.api import StorageType, StreamConfig

from frontend.cluster.gateway import Gateway
from frontend.cluster.queue import MOST_DELIVERIES, made
from ipc.catalog.entries import Catalog
from ipc.settings import Cluster, Run, Settings
from ipc.wire.cluster_names import Names
from tests.harness.broker import PATIENCE_S, broker, three_brokers
from tests.harness.server import eventually


async def _kept(url: str, replicas: int) -> bytes:
    """A message that goes through a work queue in memory and comes back."""
    client = await nats.connect(url)
    try:
        stream = client.jetstream(timeout=PATIENCE_S)
        await stream.add_stream(
            StreamConfig(name="WORK", subjects=["work.>"], storage=StorageType.MEMORY, num_replicas=replicas)
        )
        await stream.publish("work.one", b"item")
        puller = await stream.pull_subscribe("work.>", durable="puller")
        (message,) = await puller.fetch(1, timeout=PATIENCE_S)
        await message.ack_sync(timeout=PATIENCE_S)
        return message.data
    finally:
        await client.close()


def test_a_broker_keeps_a_message_until_it_is_taken_and_leaves_nothing(tmp_path: Path) -> None:
    with broker(tmp_path) as one:
        assert asyncio.run(_kept(one.url, replicas=1)) == b"item"
        pid = one.pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_broker_that_was_killed_comes_back_on_its_port_without_streams_in_memory(tmp_path: Path) -> None:
    with broker(tmp_path) as one:
        asyncio.run(_kept(one.url, replicas=1))
        before = one.url
        one.kill()
        one.start()
        assert one.url == before
        # The stream can be made again, since the one in memory died with the broker.
        assert asyncio.run(_kept(one.url, replicas=1)) == b"item"


def test_three_brokers_keep_a_message_after_the_death_of_one(tmp_path: Path) -> None:
    async def play() -> None:
        first = await nats.connect(members[0].url)

        async def has_quorum() -> bool:
            try:
                await first.jetstream().account_info()
            except Exception:
                return False
            return True

        await eventually(has_quorum, "a quorum of brokers")
        await first.close()
        assert await _kept(members[1].url, replicas=3) == b"item"

    with three_brokers(tmp_path) as members:
        asyncio.run(play())


def test_an_item_delivered_in_vain_has_one_letter_however_many_gateways_hear(tmp_path: Path) -> None:
    async def play(url: str) -> None:
        settings = Settings(cluster=Cluster(urls=(url,)), run=Run(dir=str(tmp_path / "run")))
        gateways = [Gateway(settings, Catalog(()), slot=slot) for slot in (0, 1)]
        client = await nats.connect(url)
        stream = client.jetstream(timeout=PATIENCE_S)
        await stream.add_stream(StreamConfig(name="DEAD_LETTERS", subjects=["sie.dlq.*"]))
        await made(client, Names(), settings.cluster)
        answers = await client.subscribe("_INBOX.*.dead.>")
        for each in gateways:
            each.begin()

        async def joined() -> bool:
            return all(each.broker.up for each in gateways)

        await eventually(joined, "both gateways at the broker")
        await stream.publish(Names().work("m", "default"), b"x")
        puller = await stream.pull_subscribe_bind("default_default", "WORK_POOL_default")
        for _ in range(MOST_DELIVERIES):
            (message,) = await puller.fetch(1, timeout=PATIENCE_S)
            await message.nak()

        async def asked() -> None:
            # The broker notices when somebody asks for the item once more.
            while True:
                try:
                    await puller.fetch(1, timeout=0.5)
                except NoItem:
                    continue

        asking = asyncio.create_task(asked())
        told = [json.loads((await answers.next_msg(PATIENCE_S)).data) for _ in gateways]
        asking.cancel()
        assert sorted(each.get("duplicate", False) for each in told) == [False, True]

        async def counted() -> bool:
            queue = "dead", "WORK_POOL_default default_default"
            return sum(each.counts().get(queue, 0) for each in gateways) == 1

        await eventually(counted, "the count of the letter")
        letter = json.loads((await stream.get_last_msg("DEAD_LETTERS", "sie.dlq.unknown")).data or b"")
        assert letter["reason"] == "deliveries" and f"{MOST_DELIVERIES} deliveries" in letter["error"]
        assert (await stream.stream_info("DEAD_LETTERS")).state.messages == 1
        for each in gateways:
            await each.leave()
        await client.close()

    with broker(tmp_path / "broker") as one:
        asyncio.run(play(one.url))
