"""The brokers of the tests are real: JetStream works, deaths and returns are seen, three form a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
from nats.js.api import StorageType, StreamConfig

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
