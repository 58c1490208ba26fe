"""Values of a bucket that several processes write and follow, over a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from nats.js.errors import KeyWrongLastSequenceError

from frontend.cluster.broker import Broker
from frontend.cluster.bucket import Value
from frontend.cluster.kept import Followed, Kept
from ipc.errors import ProtocolError, StateFull
from ipc.settings import Cluster
from tests.harness.broker import broker
from tests.harness.server import eventually

BUCKET = "words"


def read(data: bytes) -> str:
    if not data.isalpha():
        raise ProtocolError("no word")
    return data.decode()


class Process:
    """One process that follows the words."""

    def __init__(self, url: str) -> None:
        self.broker = Broker(Cluster(urls=(url,)), "test")
        self.kept = Kept(self.broker, BUCKET)
        self.followed = Followed(self.broker, self.kept, read)
        self.told: list[dict[str, str]] = []
        self.followed.on_change = lambda: self.told.append(dict(self.followed.values))
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.broker.start()
        self.task = asyncio.create_task(self.followed.run(self.broker))
        await until(lambda: self.followed.is_read)


async def until(condition: Callable[[], bool]) -> None:
    async def now() -> bool:
        return condition()

    await eventually(now, "the condition")


def on_broker(root: Path, scene: Callable[[Process, Process], Awaitable[None]]) -> None:
    async def whole(url: str) -> None:
        one, two = Process(url), Process(url)
        try:
            await one.start(), await two.start()
            await scene(one, two)
        finally:
            for each in (one, two):
                assert each.task is not None
                each.task.cancel()
                await each.broker.close()

    with broker(root) as server:
        asyncio.run(whole(server.url))


def test_what_one_writes_all_have_and_a_write_over_an_old_revision_is_refused(tmp_path: Path) -> None:
    async def scene(one: Process, two: Process) -> None:
        assert one.told == [{}] and await one.kept.read("a") == (None, 0)
        first = await one.kept.write("a", b"x", 0)
        await until(lambda: two.followed.values == {"a": "x"})
        assert two.followed.revision == first
        with pytest.raises(KeyWrongLastSequenceError):
            await two.kept.write("a", b"lost", 0)
        second = await two.kept.write("a", b"y", first)
        await until(lambda: one.followed.values == two.followed.values == {"a": "y"})
        assert one.followed.revision == second > first

    on_broker(tmp_path, scene)


def test_a_removed_value_goes_and_may_be_written_again(tmp_path: Path) -> None:
    async def scene(one: Process, two: Process) -> None:
        first = await one.kept.write("a", b"x", 0)
        second = await two.kept.write("a", b"y", first)
        await until(lambda: two.followed.values == {"a": "y"})
        await one.kept.remove("a", first)
        assert await two.kept.read("a") == (b"y", second), "somebody has written over the first value"
        await one.kept.remove("a", second)
        await until(lambda: not two.followed.values)
        data, revision = await two.kept.read("a")
        assert data is None and revision > 0
        await two.kept.write("a", b"again", revision)
        await until(lambda: one.followed.values == {"a": "again"})

    on_broker(tmp_path, scene)


def test_a_value_that_cannot_be_read_is_passed_over_and_counted(tmp_path: Path) -> None:
    async def scene(one: Process, two: Process) -> None:
        await one.kept.write("bad", b"1", 0)
        await one.kept.write("good", b"x", 0)
        await until(lambda: two.followed.values == {"good": "x"})
        assert two.followed.unreadable == 1
        for _ in range(2):
            two.followed._begin()
            assert await two.followed._look()
        assert two.followed.unreadable == 1, "the same value at each reading"
        await one.kept.write("bad", b"2", (await one.kept.read("bad"))[1])
        await until(lambda: two.followed.unreadable == 2)
        with pytest.raises(StateFull, match=r"2000000 bytes"):
            await one.kept.write("large", b"x" * 2_000_000, 0)

    on_broker(tmp_path, scene)


@pytest.mark.parametrize("filler", [0, 3])
def test_the_values_of_a_bucket_that_was_made_anew_take_the_place_of_all_others(
    tmp_path: Path, filler: int
) -> None:
    """The new bucket has lower revisions than the old one, or a newest revision that is higher."""

    async def scene(one: Process, two: Process) -> None:
        revision = 0
        for word in (b"x", b"y", b"z"):
            revision = await one.kept.write("a", word, revision)
        await one.kept.write("old", b"o", 0)
        await until(lambda: two.followed.values == {"a": "z", "old": "o"})
        await one.broker.client.jetstream().delete_key_value(BUCKET)
        words = {f"b{number}": "b" for number in range(filler)} | {"a": "new"}
        for key, word in words.items():
            await one.kept.write(key, word.encode(), 0)
        await until(lambda: one.followed.values == two.followed.values == words)

    on_broker(tmp_path, scene)


def test_a_value_with_the_revision_of_one_in_an_earlier_bucket_is_another_value(tmp_path: Path) -> None:
    async def scene(one: Process, two: Process) -> None:
        first = await one.kept.write("a", b"x", 0)
        await until(lambda: two.followed.values == {"a": "x"})
        two.followed._begin()
        await until(lambda: two.followed._read_of is not None)
        await one.broker.client.jetstream().delete_key_value(BUCKET)
        assert await one.kept.write("a", b"new", 0) == first
        two.followed._begin()
        await until(lambda: two.followed.values == {"a": "new"})

    on_broker(tmp_path, scene)


def test_a_value_that_is_written_while_the_bucket_is_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(one: Process, two: Process) -> None:
        await one.kept.write("a", b"x", 0)
        await until(lambda: one.followed.values == {"a": "x"})
        # From here on this test reads alone.
        assert one.task is not None
        one.task.cancel()
        one.followed._begin()
        read = one.kept.values

        async def read_and_write() -> dict[str, Value]:
            values = await read()
            one.followed.take("b", b"y", await one.kept.write("b", b"y", 0))
            return values

        monkeypatch.setattr(one.kept, "values", read_and_write)
        assert await one.followed._look()
        assert one.told[-1] == one.followed.values == {"a": "x", "b": "y"}

    on_broker(tmp_path, scene)


def test_a_process_that_begins_later_reads_the_whole_bucket(tmp_path: Path) -> None:
    async def scene(one: Process, two: Process) -> None:
        for word in ("a", "b", "c"):
            await one.kept.write(word, word.encode(), 0)
        late = Process(two.broker.client.servers[0].geturl())
        await late.start()
        assert late.told == [late.followed.values] == [{"a": "a", "b": "b", "c": "c"}], "told once"
        assert late.task is not None
        late.task.cancel()
        await late.broker.close()

    on_broker(tmp_path, scene)
