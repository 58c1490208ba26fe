"""Rows that gateways share: races, values that are damaged or strange, buckets that go, brokers that do not answer."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import sqlite3
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
from nats.js.errors import APIError

from frontend.cluster import bucket, copies, rows
from frontend.cluster.rows import SharedRows
from frontend.state.archives import from_parts
from frontend.state.errors import StateUnavailable
from frontend.state.files import FileStore, Origin
from frontend.state.sessions import SessionStore
from frontend.state.skills import SkillStore
from ipc import settings
from ipc.errors import FileNotFound, InvalidInput, StateFull
from ipc.store.store import StoreAway, StoreUnreadable
from ipc.wire.cluster import VERSION, encode
from ipc.wire.kept_rows import KeptRow, Large, key_of
from tests.fakes import streams as fake
from tests.fakes.places import gateway_at, kept_in, streams_at
from tests.fakes.streams import StreamClient, Streams
from tests.harness.server import eventually

__all__ = ["kept_in"]
T = TypeVar("T")
pytestmark = pytest.mark.parametrize("kept_in", ["brokers"], indirect=True)
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS things (id TEXT PRIMARY KEY, size INTEGER NOT NULL, data BLOB) WITHOUT ROWID;"
)
BUCKET = "penstock_agents_things-1"
PUT = "INSERT INTO things VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET size = excluded.size, data = excluded.data"


class Gateway:
    """One gateway with a store of things."""

    def __init__(self, root: Path) -> None:
        self.client = StreamClient(streams_at(root))
        self.place = gateway_at(root, self.client)
        self.rows: SharedRows = self.place.rows("things-1.db", SCHEMA, {"things": ("id",)})

    async def put(self, id_: Any, size: Any = 1, data: bytes = b"") -> None:
        await self.rows.write(lambda connection: connection.execute(PUT, (id_, size, data)))

    async def remove(self, id_: str) -> None:
        await self.rows.write(
            lambda connection: connection.execute("DELETE FROM things WHERE id = ?", (id_,))
        )

    async def ids(self) -> list[str]:
        query = "SELECT id FROM things ORDER BY id"
        return await self.rows.read(
            lambda connection: [id_ for (id_,) in connection.execute(query).fetchall()]
        )

    async def size(self, id_: str) -> int | None:
        def read(connection: sqlite3.Connection) -> int | None:
            found = connection.execute("SELECT size FROM things WHERE id = ?", (id_,)).fetchone()
            return None if found is None else int(found[0])

        return await self.rows.find(read)


@pytest.fixture
def streams(tmp_path: Path) -> Streams:
    return streams_at(tmp_path)


@pytest.fixture
def near(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


@pytest.fixture
def far(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_no_change_of_many_gateways_at_a_time_is_lost(near: Gateway, far: Gateway) -> None:
    def add(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT OR IGNORE INTO things VALUES ('sum', 0, NULL)")
        connection.execute("UPDATE things SET size = size + 1 WHERE id = 'sum'")
        return int(connection.execute("SELECT size FROM things").fetchone()[0])

    async def act() -> None:
        seen = await asyncio.gather(*(each.rows.write(add) for _ in range(20) for each in (near, far)))
        assert sorted(seen) == list(range(1, 41))
        assert await near.size("sum") == await far.size("sum") == 40

    run(act())


def test_a_gateway_gives_way_to_one_that_has_tried_more_often(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(rows, "time", clock)
    now_s, is_refused = 1000.0, True
    subject = f"$KV.{BUCKET}.{key_of('things', ['far'])}"

    def be_quicker(published: str, data: bytes) -> None:
        if published == subject and is_refused:
            row = encode(KeptRow(VERSION, "things", ["other", 1, None]))
            streams.publish(f"$KV.{BUCKET}.{key_of('things', ['other'])}", row, {})

    async def act() -> None:
        nonlocal is_refused, now_s
        await near.put("a")
        # The first attempt has made the bucket.
        now_s += rows.GIVE_WAY_S
        streams.on_publish = be_quicker
        unlucky = asyncio.create_task(far.put("far"))

        async def is_heard() -> bool:
            return any(number for number, _ in near.rows._others.values())

        await eventually(is_heard, "a second attempt")
        later = asyncio.create_task(near.put("near"))
        assert await asyncio.wait([later], timeout=0.2) == (set(), {later})
        is_refused = False
        await unlucky
        assert not later.done()
        now_s += rows.GIVE_WAY_S
        await later
        assert {"far", "near"} <= set(await far.ids())

    run(act())


@pytest.mark.parametrize("text", ["", "x", "x y", "x -1", "x 99999", "x \u00b2", f"{'x' * 5000} 1 1"])
def test_strange_words_about_attempts_delay_nobody(near: Gateway, text: str) -> None:
    async def act() -> None:
        await near.put("a")
        near.client.hear(f"$KV.{BUCKET}.x", b"", {rows.ATTEMPT: text})
        assert not near.rows._others
        await near.put("b")

    run(act())


def test_a_write_that_fails_leaves_nothing_and_is_told(near: Gateway, far: Gateway, streams: Streams) -> None:
    def write(connection: sqlite3.Connection) -> None:
        connection.execute(PUT, ("a", 1, b""))
        raise StateFull("no")

    async def act() -> None:
        with pytest.raises(StateFull):
            await near.rows.write(write)
        assert await near.ids() == await far.ids() == []
        assert not streams.by_name, "nothing was published"

    run(act())


def test_names_of_any_characters_become_no_part_of_a_subject(
    near: Gateway, far: Gateway, streams: Streams
) -> None:
    names = ["a.b", ">", "*", "x y", "\r\nPUB x 0\r\n", "ä" * 500, "", "\x00", "🙂"]

    async def act() -> None:
        for name in names:
            await near.put(name)
        assert await far.ids() == sorted(names)
        for subject in streams.stream(f"KV_{BUCKET}").messages:
            head, _, digest = subject.rpartition(".")
            assert head == f"$KV.{BUCKET}.things" and len(digest) == 32 and digest.isalnum()

    run(act())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1garbage",
        b"\x81" * 100_000,
        encode(KeptRow(VERSION + 1, "things", ["a", 9, b""])),
        encode(KeptRow(VERSION, "things", ["a", 9])),
        encode(KeptRow(VERSION, "things", ["another", 9, b""])),
        encode(KeptRow(VERSION, "things", ["a", None, b""])),
        encode(KeptRow(VERSION, "things", ["a", 1 << 63, b""])),
        encode(KeptRow(VERSION, "things", ["a", {"a": 1}, b""])),
        encode(KeptRow(VERSION, "sqlite_master", ["a", 9, b""])),
        encode(KeptRow(VERSION, "things", [], Large(VERSION, "gone-" + "0" * 32, 9, 1, b"x"))),
        encode(KeptRow(VERSION, "things", [], Large(VERSION, "../*.>", 9, 1, b"x"))),
        encode(KeptRow(VERSION, "things", [], Large(VERSION, "gone-" + "0" * 32, 0, -1, b"x"))),
    ],
)
def test_a_damaged_value_is_a_row_that_is_gone_and_may_be_written_again(
    near: Gateway, far: Gateway, streams: Streams, value: bytes
) -> None:
    async def act() -> None:
        await near.put("a")
        await near.put("b", 2)
        streams.publish(f"$KV.{BUCKET}.{key_of('things', ['a'])}", value, {})
        for each in (near, far):
            assert await each.ids() == ["b"]
        await far.put("a", 3)
        assert await near.size("a") == 3

    run(act())


def test_values_under_strange_keys_harm_nobody(near: Gateway, far: Gateway, streams: Streams) -> None:
    async def act() -> None:
        await near.put("a")
        for key in ("x", "things", "things.x.y", "sqlite_master.0", "_keys.0"):
            streams.publish(f"$KV.{BUCKET}.{key}", b"data", {})
            streams.publish(f"$KV.{BUCKET}.{key}", b"", {"KV-Operation": "DEL"})
        assert await near.ids() == await far.ids() == ["a"]
        await far.put("b")
        assert await near.ids() == ["a", "b"]

    run(act())


def test_a_bucket_that_goes_takes_its_rows_along_and_is_made_anew(
    near: Gateway, far: Gateway, streams: Streams
) -> None:
    async def act() -> None:
        for number in range(5):
            await near.put(f"a{number}")
        assert len(await far.ids()) == 5
        streams.drop(BUCKET)
        assert await near.ids() == []
        await far.put("b")
        assert await near.ids() == ["b"]
        streams.drop(BUCKET)
        streams.create(BUCKET)
        await near.put("c")
        assert await far.ids() == await near.ids() == ["c"], (
            "revisions of an earlier bucket count for nothing"
        )

    run(act())


def test_a_row_whose_value_was_deleted_without_a_mark_goes_and_may_be_written_again(
    near: Gateway, far: Gateway, streams: Streams
) -> None:
    async def act() -> None:
        await near.put("a")
        await near.put("b")
        assert await far.ids() == ["a", "b"]
        del streams.stream(f"KV_{BUCKET}").messages[f"$KV.{BUCKET}.{key_of('things', ['a'])}"]
        await near.rows.sweep()
        assert await near.ids() == ["b"]

        def change_both(connection: sqlite3.Connection) -> None:
            connection.execute(PUT, ("b", 5, b""))
            connection.execute(PUT, ("a", 5, b""))

        await far.rows.write(change_both)
        assert await near.size("a") == await near.size("b") == 5

    run(act())


def test_marks_of_removed_rows_are_deleted_after_a_while(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        for name in ("a", "b", "c"):
            await near.put(name)
        assert await far.ids() == ["a", "b", "c"]
        await near.remove("c")
        assert await far.ids() == ["a", "b"]
        await near.rows.sweep()
        assert len(streams.stream(f"KV_{BUCKET}").messages) == 3
        monkeypatch.setattr(copies, "MARKS_S", -1.0)
        await near.rows.sweep()
        await far.rows.sweep()
        assert len(streams.stream(f"KV_{BUCKET}").messages) == 2
        await far.put("c", 2)
        assert await near.size("c") == 2

    run(act())


def test_a_copy_that_was_not_looked_after_for_long_begins_anew(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        await near.put("a")
        await near.put("b")
        assert await far.ids() == ["a", "b"]
        await near.remove("a")
        # Its mark is deleted before the other gateway has seen it.
        del streams.stream(f"KV_{BUCKET}").messages[f"$KV.{BUCKET}.{key_of('things', ['a'])}"]
        far.rows._fresh_s -= rows.MARKS_S
        assert await far.ids() == ["b"]

    run(act())


def test_many_rows_are_read_together_by_a_gateway_that_begins_later(near: Gateway, far: Gateway) -> None:
    async def act() -> None:
        for number in range(3 * rows.FEW):
            await near.put(f"{number:03}", number)
        await near.remove("001")
        assert len(await far.ids()) == 3 * rows.FEW - 1
        assert await far.size("002") == 2
        assert far.client.streams.requests < 20 * rows.FEW

    run(act())


def test_large_rows_lie_in_parts_which_go_with_the_row(near: Gateway, far: Gateway, streams: Streams) -> None:
    def parts() -> int:
        return len(streams.stream("KV_penstock_files").messages)

    async def act() -> None:
        await near.put("a", 1, b"x" * 1_000_000)
        data = await far.rows.read(
            lambda connection: connection.execute("SELECT data FROM things").fetchone()
        )
        assert data == (b"x" * 1_000_000,) and parts() == 9
        await far.put("a", 2, b"y" * 300_000)
        assert await near.size("a") == 2 and parts() == 4
        await near.put("a", 3)
        assert await far.size("a") == 3 and parts() == 0
        await near.put("a", 4, b"z" * 300_000)
        await far.remove("a")
        assert await near.ids() == [] and parts() == 0

    run(act())


def test_rows_larger_than_a_row_may_be_are_neither_written_nor_read(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        await near.put("a", 1, b"x" * 600_000)
        far.rows._most_nbytes = 500_000
        reads: list[Large] = []
        monkeypatch.setattr(far.rows._parts, "read", reads.append)
        assert await far.ids() == [] and not reads, "no part of a forged row is asked for"
        with pytest.raises(StoreUnreadable, match=r"has 600\d\d\d bytes, 500000 may be") as refused:
            await far.put("b", 1, b"x" * 600_000)
        assert refused.value.errno == errno.EFBIG
        assert await near.ids() == ["a"]

    run(act())


def test_brokers_without_room_are_told_until_a_write_finds_room(near: Gateway, streams: Streams) -> None:
    def refuse(subject: str, data: bytes) -> None:
        raise APIError(code=503, description="insufficient storage resources available", err_code=10047)

    def lose(subject: str, data: bytes) -> None:
        raise TimeoutError

    async def act() -> None:
        await near.put("a")
        for data in (b"", b"x" * 300_000):
            assert not near.place.lacks_room(1)
            streams.on_publish = refuse
            with pytest.raises(StoreUnreadable, match="no room"):
                await near.put("b", 1, data)
            assert near.place.lacks_room(1)
            # What changes nothing finds no room, and what reaches no broker neither.
            await near.remove("none")
            assert near.place.lacks_room(1)
            streams.on_publish = lose
            with pytest.raises(StoreUnreadable):
                await near.put("b", 1, data)
            assert near.place.lacks_room(1)
            streams.on_publish = lambda subject, data: None
            await near.put("c", 1, data)
        assert not near.place.lacks_room(1)

    run(act())


def test_small_messages_of_brokers_are_enough(near: Gateway, far: Gateway, streams: Streams) -> None:
    streams.max_payload = 64 << 10

    async def act() -> None:
        await near.put("a", 1, b"x" * 200_000)
        assert await far.size("a") == 1
        assert (
            max(len(data) for _, data, _ in streams.stream("KV_penstock_files").messages.values()) < 64 << 10
        )

    run(act())


def test_parts_that_no_row_names_are_swept_once_their_writer_is_dead_or_has_forgotten_them(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        await near.put("kept", 1, b"x" * 300_000)
        parts = near.rows._parts
        name, whole = parts.new_name(), b"y" * 1000

        async def read(position: int, count: int) -> bytes:
            return whole[position : position + count]

        await parts.put(name, len(whole), read)
        before = len(streams.stream("KV_penstock_files").messages)
        await far.rows.sweep()
        await near.rows.sweep()
        assert len(streams.stream("KV_penstock_files").messages) == before, "their writer lives"
        parts.writing.clear()
        await near.rows.sweep()
        assert len(streams.stream("KV_penstock_files").messages) == before, "a row may come late"
        await near.rows.sweep()
        assert len(streams.stream("KV_penstock_files").messages) == before - 2
        assert await far.size("kept") == 1
        await parts.put(name, len(whole), read)
        monkeypatch.setattr(far.place.lives, "is_running", lambda identity: False)
        await far.rows.sweep()
        assert len(streams.stream("KV_penstock_files").messages) == before, "its writer may only stand still"
        await far.rows.sweep()
        assert len(streams.stream("KV_penstock_files").messages) == before - 2

    run(act())


def lost_answers(streams: Streams, monkeypatch: pytest.MonkeyPatch, table: str, *, kept: bool) -> None:
    """Have writes of rows of a table time out; the brokers keep them all the same, or not."""
    publish = streams.publish

    def lose(subject: str, data: bytes, headers: dict[str, str]) -> int:
        is_row = f".{table}." in subject and "penstock_files" not in subject
        if kept or not is_row:
            number = publish(subject, data, headers)
        if is_row:
            raise TimeoutError("the answer was lost")
        return number

    monkeypatch.setattr(streams, "publish", lose)


@pytest.mark.parametrize("kept", [True, False])
def test_parts_of_a_row_whose_write_was_not_confirmed_stay_just_as_long_as_the_row(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    async def act() -> None:
        await near.put("a")
        with monkeypatch.context() as patch:
            lost_answers(streams, patch, "things", kept=kept)
            with pytest.raises(StoreAway):
                await near.put("a", 2, b"x" * 300_000)
        for _ in range(2):
            await near.rows.sweep()
        assert await near.size("a") == await far.size("a") == (2 if kept else 1)
        assert bool(streams.stream("KV_penstock_files").messages) == kept

    run(act())


def test_a_file_whose_row_was_not_confirmed_but_kept_has_its_content(
    tmp_path: Path, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        near, far = (FileStore(gateway_at(tmp_path), settings.State()) for _ in range(2))
        with monkeypatch.context() as patch:
            lost_answers(streams, patch, "files", kept=True)
            with pytest.raises(StateUnavailable):
                await near.add("o", b"x" * 1000, name="a", purpose="p", origin=Origin("t"))
        for _ in range(2):
            await near.sweep()
        (file,), _ = await far.page("o")
        assert await far.reading(file, lambda descriptor: os.pread(descriptor, 2000, 0)) == b"x" * 1000

    run(act())


@pytest.mark.parametrize("few", [rows.FEW, 1])
def test_a_large_row_that_is_replaced_while_it_is_read_is_not_away_meanwhile(
    near: Gateway, far: Gateway, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(rows, "FEW", few)
    sizes = iter((3, 4))

    async def act() -> None:
        await near.put("a", 1, b"x" * 300_000)
        assert await far.size("a") == 1
        far.rows.close()
        await near.put("b")
        await near.put("a", 2, b"y" * 300_000)
        read = far.rows._parts.read

        async def read_late(large: Large) -> bytes:
            found = await far.rows._copy.read(
                lambda connection: connection.execute("SELECT * FROM things").fetchall()
            )
            assert found, "whoever reads now finds the row of before"
            for size in itertools.islice(sizes, 1):
                await near.put("a", size, b"z" * 300_000)
            return await read(large)

        monkeypatch.setattr(far.rows._parts, "read", read_late)
        assert await far.size("a") == 4

    run(act())


def test_a_read_that_waited_behind_a_cancelled_one_looks_itself(near: Gateway, far: Gateway) -> None:
    async def act() -> None:
        await near.put("a")
        assert await near.ids() == ["a"]
        near.rows.close()
        begun = near.rows._begun
        async with near.rows._refreshing:
            await far.put("b")
            first, second = (asyncio.ensure_future(near.ids()) for _ in range(2))
            await asyncio.sleep(0)
        for _ in range(100):
            if near.rows._begun > begun:
                break
            await asyncio.sleep(0)
        first.cancel()
        assert await second == ["a", "b"]
        assert first.cancelled() and near.rows._begun == begun + 2

    run(act())


def test_keys_that_brokers_tell_in_pages_are_all_there(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bucket, fake):
        monkeypatch.setattr(module, "PAGE", 2)

    async def act() -> None:
        for name in "abcde":
            await near.put(name)
        await near.rows.sweep()
        assert near.rows._copy.is_open and await near.ids() == list("abcde")
        del streams.stream(f"KV_{BUCKET}").messages[f"$KV.{BUCKET}.{key_of('things', ['c'])}"]
        request = near.client.client.request

        async def change(*asked: Any, **options: Any) -> Any:
            await far.put("f")
            return await request(*asked, **options)

        with monkeypatch.context() as patch:
            patch.setattr(near.client.client, "request", change)
            await near.rows.sweep()
        assert await near.ids() == list("abcdef"), "keys that changed meanwhile tell nothing"
        await near.rows.sweep()
        assert await near.ids() == list("abdef")

    run(act())


def test_a_bucket_that_is_read_for_long_is_read_as_long_as_values_come(
    near: Gateway, far: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        for number in range(rows.FEW + 8):
            await near.put(f"{number:03}", number)
        loop, message, passed = asyncio.get_running_loop(), far.rows._message, 0.0
        now = loop.time

        async def slowly(*of: Any) -> Any:
            nonlocal passed
            passed += bucket.VALUE_S * 0.5
            await asyncio.sleep(0)
            return await message(*of)

        monkeypatch.setattr(loop, "time", lambda: now() + passed)
        monkeypatch.setattr(far.rows, "_message", slowly)
        assert len(await far.ids()) == rows.FEW + 8

    run(act())


def test_writes_that_the_broker_which_reads_out_does_not_have_yet_are_asked_for(
    near: Gateway, far: Gateway, streams: Streams
) -> None:
    async def act() -> None:
        for number in range(rows.FEW + 8):
            await near.put(f"{number:03}", number)
        streams.lag = 2
        assert len(await far.ids()) == rows.FEW + 8

    run(act())


def test_a_row_of_the_bucket_reaches_no_path_of_the_host(tmp_path: Path, streams: Streams) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")

    async def act() -> None:
        near, far = (FileStore(gateway_at(tmp_path), settings.State()) for _ in range(2))
        made = await near.add("o", b"secret", name="a", purpose="p", origin=Origin("t"))
        ((subject, (_, data, _)),) = streams.stream("KV_penstock_agents_files-1").messages.items()
        row = msgspec.msgpack.decode(data, type=KeptRow)
        values = [str(secret) if value == made.content else value for value in row.values]
        streams.publish(subject, encode(KeptRow(VERSION, row.table, values)), {})
        found = await far.get("o", made.id)
        assert found.content == str(secret)
        with pytest.raises(FileNotFound):
            await far.open(found)
        await far.delete("o", made.id)
        assert secret.read_bytes() == b"secret"

    run(act())


def test_without_a_broker_reads_go_on_from_the_copy_and_all_else_is_away(near: Gateway, far: Gateway) -> None:
    def missing(connection: sqlite3.Connection) -> None:
        raise InvalidInput("no such thing")

    async def act() -> None:
        await near.put("a")
        far.client.up = False
        with pytest.raises(StoreAway):
            await far.ids()
        near.client.up = False
        assert await near.ids() == ["a"] and await near.size("a") == 1
        with pytest.raises(StoreAway):
            await near.size("b")
        with pytest.raises(StoreAway):
            await near.rows.read(missing)
        with pytest.raises(StoreAway):
            await near.put("b")
        near.client.up = far.client.up = True
        assert await far.ids() == await near.ids() == ["a"]

    run(act())


def test_a_broker_that_answers_nothing_is_away_and_tells_nothing_wrong(near: Gateway, far: Gateway) -> None:
    async def act() -> None:
        await near.put("a")
        near.client.is_silent = True
        assert await near.ids() == ["a"]
        with pytest.raises(StoreAway) as caught:
            await near.put("b")
        assert caught.value.retry_after_s == 1
        near.client.is_silent = False
        assert await far.ids() == await near.ids() == ["a"]

    run(act())


def test_a_broker_that_answers_nothing_is_waited_for_once_by_all_that_wait(
    near: Gateway, far: Gateway, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1e9, rows.LONG_S)

    async def act() -> None:
        await far.put("a")
        # The first attempt of the first write has made the bucket, and near would give way to the second one.
        await far.put("a")
        near.client.is_silent = True
        before = streams.requests
        found = await asyncio.gather(*(near.ids() for _ in range(20)), return_exceptions=True)
        assert all(isinstance(each, StoreAway) for each in found)
        assert streams.requests - before <= 2
        monkeypatch.setattr(rows, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with pytest.raises(StoreAway):
            await near.put("b")
        before = streams.requests
        with pytest.raises(StoreAway):
            await near.put("b")
        assert streams.requests == before, "a look that took half a second has failed a moment ago"
        near.client.is_silent = False
        for joined in near.client.on_up:
            joined()
        await near.put("b")
        assert await far.ids() == ["a", "b"]

    run(act())


def test_a_store_that_is_away_is_told_to_clients_as_unavailable(tmp_path: Path) -> None:
    async def act() -> None:
        client = StreamClient(streams_at(tmp_path))
        kept = SessionStore(gateway_at(tmp_path, client), settings.State())
        client.up = False
        await kept.sweep()
        with pytest.raises(StateUnavailable) as caught:
            await kept.save("a", "s", [], [])
        assert (caught.value.status, caught.value.retry_after()) == (503, "1")

    run(act())


def test_a_gateway_that_stops_between_two_rows_leaves_nothing_that_others_see_in_part(
    tmp_path: Path, streams: Streams
) -> None:
    guide = b"---\nname: n\ndescription: d\n---\n"

    async def act() -> None:
        clients = [StreamClient(streams) for _ in range(2)]
        near, far = (SkillStore(gateway_at(tmp_path, client), settings.State()) for client in clients)
        skill = await near.add("o", from_parts([("SKILL.md", guide)]))

        def stop(subject: str, data: bytes) -> None:
            clients[0].is_silent = subject.startswith("$KV.penstock_agents_skills-1.skills.")

        streams.on_publish = stop
        with pytest.raises(StateUnavailable):
            await near.add_version("o", skill.id, from_parts([("SKILL.md", guide)]))
        streams.on_publish = lambda subject, data: None
        assert (await far.get("o", skill.id)).latest == 1
        assert (await far.add_version("o", skill.id, from_parts([("SKILL.md", guide)]))).number == 3
        assert (await far.get("o", skill.id)).latest == 3

    run(act())


@pytest.mark.parametrize("damage", ["shorter", "another byte", "gone", "no description"])
def test_a_content_that_is_torn_at_the_brokers_is_no_file(
    tmp_path: Path, streams: Streams, damage: str
) -> None:
    async def act() -> None:
        near, far = (FileStore(gateway_at(tmp_path), settings.State()) for _ in range(2))
        made = await near.add("o", b"x" * 200_000, name="a", purpose="p", origin=Origin("t"))
        messages = streams.stream("KV_penstock_files").messages
        first, description = (
            next(subject for subject in messages if subject.endswith(ending)) for ending in (".0", ".all")
        )
        revision, data, headers = messages[first]
        if damage == "gone":
            del messages[first]
        elif damage == "no description":
            messages[description] = messages[description][0], b"\xc1", {}
        else:
            messages[first] = revision, data[1:] if damage == "shorter" else b"y" + data[1:], headers
        with pytest.raises(FileNotFound):
            await far.open(await far.get("o", made.id))
        assert await near.open(made) > 0, "its writer has a copy"

    run(act())
