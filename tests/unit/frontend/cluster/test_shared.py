"""A value that several processes change, over a real broker: no change is lost, and no change tries for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from nats.js.errors import KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from frontend.cluster.broker import Broker
from frontend.cluster.shared import MOST_TRIES, Shared
from ipc.errors import ProtocolError, QueueUnavailable, StateFull
from ipc.settings import Cluster
from tests.harness.broker import broker
from tests.harness.server import eventually

BUCKET, KEY = "numbers", "all"
Numbers = tuple[int, ...]


def read(data: bytes) -> Numbers:
    try:
        return tuple(map(int, data.split()))
    except ValueError as error:
        raise ProtocolError(f"no numbers: {error}") from error


def write(numbers: Numbers) -> bytes:
    return " ".join(map(str, numbers)).encode()


class Process:
    """One process that follows the numbers."""

    def __init__(self, url: str) -> None:
        self.broker = Broker(Cluster(urls=(url,)), "test")
        self.shared = Shared[Numbers](self.broker, BUCKET, KEY, read, write, ())

    async def add(self, *numbers: int) -> Numbers:
        return await self.shared.change(lambda value: (*value, *numbers))

    async def bucket(self) -> KeyValue:
        return await self.broker.client.jetstream().key_value(BUCKET)


def on_broker(root: Path, scene: Callable[[Process, Process], Awaitable[None]]) -> None:
    """Run a scene of two processes that have joined one broker."""

    async def joined(one: Process) -> None:
        one.broker.start()

        async def up() -> bool:
            return one.broker.up

        await eventually(up, "the broker")

    async def whole(url: str) -> None:
        one, other = Process(url), Process(url)
        await joined(one)
        await joined(other)
        try:
            await scene(one, other)
        finally:
            await one.broker.close()
            await other.broker.close()

    with broker(root) as running:
        asyncio.run(whole(running.url))


def test_changes_of_two_processes_at_a_time_are_all_kept(tmp_path: Path) -> None:
    async def scene(one: Process, other: Process) -> None:
        assert not one.shared.is_read
        await asyncio.gather(*(process.add(number) for number in range(20) for process in (one, other)))
        value = await one.add(99)
        assert sorted(value) == sorted([*range(20), *range(20), 99]) and one.shared.is_read

    on_broker(tmp_path, scene)


def test_a_process_hears_of_a_change_and_of_a_bucket_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(one: Process, other: Process) -> None:
        following = asyncio.create_task(other.shared.run())

        async def heard(value: Numbers) -> None:
            async def same() -> bool:
                return other.shared.value == value

            await eventually(same, f"the value {value}")

        await one.add(1)
        await heard((1,))
        await (await one.bucket()).delete(KEY)
        await heard(())
        assert await one.add(2) == (2,), "the mark of a removed value is no hindrance"
        await heard((2,))
        await one.broker.client.jetstream().delete_key_value(BUCKET)
        other.shared._wanted.set()
        await heard(())
        assert await one.add(3) == (3,)
        await heard((3,))
        following.cancel()

    on_broker(tmp_path, scene)


def test_a_value_that_nobody_can_read_stays_and_is_not_written_over(tmp_path: Path) -> None:
    async def scene(one: Process, other: Process) -> None:
        await one.add(1)
        await (await one.bucket()).put(KEY, b"of another version")
        with pytest.raises(QueueUnavailable, match="no numbers"):
            await one.add(2)
        assert one.shared.value == (1,)
        assert (await (await one.bucket()).get(KEY)).value == b"of another version"

    on_broker(tmp_path, scene)


def test_a_value_that_is_larger_than_a_message_is_refused_with_both_sizes(tmp_path: Path) -> None:
    async def scene(one: Process, other: Process) -> None:
        await one.add(1)
        with pytest.raises(StateFull, match=r"would have \d+ bytes; the brokers take \d+"):
            await one.add(*[10**9] * 150_000)
        assert one.shared.value == (1,) == await other.add()

    on_broker(tmp_path, scene)


def test_who_always_comes_second_is_refused_after_so_many_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(one: Process, other: Process) -> None:
        await one.add(1)
        tries = 0

        async def quicker(*_: object, **__: object) -> int:
            nonlocal tries
            tries += 1
            raise KeyWrongLastSequenceError(description="somebody was quicker")

        monkeypatch.setattr(KeyValue, "update", quicker)
        with pytest.raises(QueueUnavailable, match="too many others"):
            await one.add(2)
        assert tries == MOST_TRIES and one.shared.value == (1,)

    on_broker(tmp_path, scene)
