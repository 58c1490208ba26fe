"""A whole reading of a bucket at the brokers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from frontend.cluster import bucket
from frontend.cluster.broker import Broker, QuickClient
from frontend.cluster.bucket import GONE, LOST, Value, all_values, create, values_of
from ipc.settings import Cluster
from tests.harness.broker import broker
from tests.harness.server import eventually


def played(tmp_path: Path, scene: Callable[[Broker], Awaitable[None]]) -> None:
    """Run a scene with the end of a broker, which has a bucket "b"."""

    async def whole(url: str) -> None:
        end = Broker(Cluster(urls=(url,)), "test")
        end.start()

        async def joined() -> bool:
            return end.up

        await eventually(joined, "the broker")
        await create(end, "b", None)
        await scene(end)
        await end.close()

    with broker(tmp_path) as one:
        asyncio.run(whole(one.url))


async def values(end: Broker, name: str = "b") -> list[Value]:
    return [value async for value in all_values(end, name)]


async def put(end: Broker, key: str, data: bytes) -> None:
    await end.client.jetstream().publish(f"$KV.b.{key}", data)


async def fill(end: Broker) -> None:
    for key in ("a", "b", "c"):
        await put(end, key, key.encode())
    kept = await end.client.jetstream().key_value("b")
    await kept.delete("b")
    await put(end, "a", b"new")


def test_the_last_write_of_each_key_is_read_in_the_order_of_the_writes(tmp_path: Path) -> None:
    async def scene(end: Broker) -> None:
        assert await values(end) == []
        await fill(end)
        found = await values(end)
        assert [(each.key, each.data, each.revision) for each in found] == [
            ("c", b"c", 3),
            ("b", b"", 4),
            ("a", b"new", 5),
        ]
        assert [each.operation in GONE for each in found] == [False, True, False]
        with pytest.raises(NotFoundError):
            await values(end, "other")

    played(tmp_path, scene)


def test_values_that_come_after_every_answer_of_the_broker_are_no_empty_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers calls from another queue than values: a call that came later may be answered earlier."""
    process, tasks = QuickClient._process_msg, set[asyncio.Task[None]]()

    async def later(*message: Any) -> None:
        await asyncio.sleep(0.1)
        await process(*message)

    async def late(*message: Any) -> None:
        if message[2].startswith(b"$KV."):
            tasks.add(asyncio.get_running_loop().create_task(later(*message)))
        else:
            await process(*message)

    async def scene(end: Broker) -> None:
        await fill(end)
        monkeypatch.setattr(QuickClient, "_process_msg", late)
        assert [each.key for each in await values(end)] == ["c", "b", "a"]
        assert tasks

    played(tmp_path, scene)


def test_a_reading_ends_as_lost_where_no_value_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = QuickClient._process_msg

    async def deaf(*message: Any) -> None:
        if not message[2].startswith(b"$KV."):
            await process(*message)

    async def scene(end: Broker) -> None:
        await fill(end)
        monkeypatch.setattr(bucket, "VALUE_S", 0.2)
        monkeypatch.setattr(QuickClient, "_process_msg", deaf)
        with pytest.raises(LOST):
            await values(end)

    played(tmp_path, scene)


def test_readings_leave_brokers_no_consumers_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream has room for so many consumers, and then no gateway could read the bucket."""
    monkeypatch.setattr(bucket, "VALUE_S", 0.5)

    async def scene(end: Broker) -> None:
        await put(end, "a", b"a")
        for _ in range(3):
            await values(end)

        async def none_left() -> bool:
            return (await end.client.jetstream().stream_info("KV_b")).state.consumer_count == 0

        await eventually(none_left, "the end of the consumers")

    played(tmp_path, scene)


def test_a_slow_reader_has_the_brokers_wait_and_hears_of_later_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers send 2 MiB ahead of a reader at first, more after each 5 s, and nothing of that is lost."""
    small = partialmethod(JetStreamContext.subscribe, pending_msgs_limit=4, pending_bytes_limit=512 << 10)
    monkeypatch.setattr(JetStreamContext, "subscribe", small)

    async def scene(end: Broker) -> None:
        for number in range(160):
            await put(end, f"{number}", bytes(128 << 10))
        before = end.client.stats["in_bytes"]
        reader = all_values(end, "b")
        read = [await anext(reader)]
        for _ in range(100):
            await end.client.flush()
        assert end.client.stats["in_bytes"] - before < 16 << 20
        await (await end.client.jetstream().key_value("b")).delete("0")
        read += [value async for value in reader]
        assert [value.key for value in read] == [*map(str, range(160)), "0"]

        async def again(*_: object) -> AsyncIterator[Value]:
            for value in read:
                yield value

        monkeypatch.setattr(bucket, "all_values", again)
        assert [*await values_of(end, "b")] == [*map(str, range(1, 160))]

    played(tmp_path, scene)


def test_a_broker_that_waits_for_the_reader_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the looks of the library, and before the broker asks whether the reader is still there."""

    async def no_look(flow: object) -> None:
        """The library looks no more."""

    monkeypatch.setattr(JetStreamContext._JSI, "check_flow_control_response", no_look)
    monkeypatch.setattr(
        JetStreamContext, "subscribe", partialmethod(JetStreamContext.subscribe, idle_heartbeat=100)
    )

    async def scene(end: Broker) -> None:
        for number in range(64):
            await put(end, f"{number}", bytes(128 << 10))
        assert len(await values(end)) == 64

    played(tmp_path, scene)
