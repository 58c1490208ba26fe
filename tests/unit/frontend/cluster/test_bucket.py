"""The bucket of models over a real broker: rows that are forgotten, rows that are larger than a message may be."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from nats.js.errors import NoKeysError

from frontend.cluster import bucket as module
from frontend.cluster.broker import Broker
from frontend.cluster.bucket import Follower, Writer
from ipc.catalog.entries import HubSource, ModelEntry
from ipc.settings import Cluster
from ipc.wire.cluster import MOST_MESSAGE_NBYTES, VERSION
from ipc.wire.cluster_names import Names, row_key
from ipc.wire.cluster_parts import is_part
from ipc.wire.cluster_rows import BoxRow, ModelRow, Row
from tests.harness.broker import broker
from tests.harness.server import eventually


def rows(box: str) -> dict[str, Row]:
    return {box: BoxRow(VERSION, box, "life", "default", "default", [], True, [])}


async def keys(end: Broker) -> set[str]:
    """The keys of the bucket, which has some: the client library may end a reading before any has come."""
    bucket = await end.client.jetstream().key_value(Names().models)
    found = set[str]()

    async def is_read() -> bool:
        with suppress(NoKeysError):
            found.update(await bucket.keys())
        return bool(found)

    await eventually(is_read, "keys")
    return found


@pytest.mark.parametrize("former_s", [None, 0.0])
def test_rows_that_nobody_writes_any_more_are_forgotten_by_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former_s: float | None
) -> None:
    """With `former_s` the bucket was made with another age of its rows."""

    async def scene() -> None:
        end = Broker(Cluster(urls=(one.url,)), "test")
        end.start()

        async def joined() -> bool:
            return end.up

        await eventually(joined, "the broker")
        gone, here = Writer(end, Names()), Writer(end, Names())
        if former_s is not None:
            monkeypatch.setattr(module, "ROWS_S", former_s)
            assert await gone.write(rows("gone"))
            monkeypatch.setattr(module, "ROWS_S", 1.0)
            assert await here.write(rows("here"))
        else:
            monkeypatch.setattr(module, "ROWS_S", 1.0)
            assert await gone.write(rows("gone")) and await here.write(rows("here"))

        async def only_here() -> bool:
            here.forget()
            assert await here.write(rows("here"))
            return await keys(end) == {"here"}

        await eventually(only_here, "the end of the rows of a box that is gone")
        await end.close()

    with broker(tmp_path) as one:
        asyncio.run(scene())


def model_row(nbytes: int, letter: str = "x") -> ModelRow:
    """A row of about so many bytes."""
    document = {"labels": letter * nbytes}
    return ModelRow(VERSION, "life", ModelEntry("m", HubSource("m")), None, {}, document=document)


def rows_with(models: dict[str, ModelRow]) -> dict[str, Row]:
    box = BoxRow(VERSION, "a", "life", "default", "default", [], True, sorted(models))
    return {**{row_key("a", model): row for model, row in models.items()}, "a": box}


class Watcher:
    """What a gateway knows of the bucket."""

    def __init__(self, url: str) -> None:
        self.rows: dict[str, Row] = {}
        self.end = Broker(Cluster(urls=(url,)), "watcher")
        self.follower = Follower(self.end, Names(), self._take, self._read)

    def _take(self, key: str, row: Row | None) -> None:
        assert not is_part(key)
        self.rows.pop(key, None)
        if row is not None:
            self.rows[key] = row

    def _read(self, rows: dict[str, Row]) -> None:
        self.rows = dict(rows)

    async def start(self) -> None:
        self.end.start()
        await eventually(self._is_up, "the broker")

    async def _is_up(self) -> bool:
        return self.end.up


@pytest.mark.parametrize("small", [True, False])
def test_rows_that_are_larger_than_a_message_arrive_and_change_and_go(tmp_path: Path, small: bool) -> None:
    """Heard live, and read whole by a gateway that begins later; the box has rows that fit beside."""

    async def scene(url: str) -> None:
        box, live = Broker(Cluster(urls=(url,)), "box"), Watcher(url)
        box.start()
        await live.start()

        async def joined() -> bool:
            return box.up

        await eventually(joined, "the broker")
        assert (box.client.max_payload == 64 << 10) == small
        writer = Writer(box, Names())
        told = {"m": model_row(3 << 20), "n": model_row(10)}
        for large in (model_row(3 << 20), model_row(1 << 20, "y"), model_row(100)):
            told["m"] = large
            assert await writer.write(rows_with(told))

            async def has_all() -> bool:
                return live.rows == rows_with(told)

            await eventually(has_all, "the rows")
            late = Watcher(url)
            await late.start()
            await eventually(late.follower._read_all, "a reading of the bucket")
            assert late.rows == rows_with(told)
            await late.end.close()
        assert not any(is_part(key) for key in await keys(box)), "parts go with their row"
        await box.close()
        await live.end.close()

    with broker(tmp_path, more="max_payload: 64KB" if small else "") as one:
        asyncio.run(scene(one.url))


def test_a_reading_while_a_box_writes_parts_of_a_row_leaves_the_row_of_before(tmp_path: Path) -> None:
    async def scene(url: str) -> None:
        box, live = Broker(Cluster(urls=(url,)), "box"), Watcher(url)
        box.start()
        await live.start()

        async def joined() -> bool:
            return box.up

        await eventually(joined, "the broker")
        told = rows_with({"m": model_row(1 << 18)})
        assert await Writer(box, Names()).write(told)

        async def has_all() -> bool:
            return live.rows == told

        await eventually(has_all, "the rows")
        bucket = await box.client.jetstream().key_value(Names().models)
        await bucket.put(next(key for key in await keys(box) if is_part(key)), b"of the next value")
        assert await live.follower._read_all()
        assert live.rows == told
        await box.close()
        await live.end.close()

    with broker(tmp_path) as one:
        asyncio.run(scene(one.url))


def test_a_model_whose_row_is_too_large_is_named_and_leaves_the_others_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(url: str) -> None:
        box, live = Broker(Cluster(urls=(url,)), "box"), Watcher(url)
        box.start()
        await live.start()

        async def joined() -> bool:
            return box.up

        await eventually(joined, "the broker")
        writer, counts = Writer(box, Names()), list[int]()
        writer.on_untold = counts.append
        told = {"m": model_row(MOST_MESSAGE_NBYTES), "n": model_row(10)}
        for _ in range(2):
            assert await writer.write(rows_with(told))

        async def has_other() -> bool:
            return live.rows == rows_with({"n": told["n"]})

        await eventually(has_other, "the row that fits")
        told["m"] = model_row(10)
        assert await writer.write(rows_with(told))
        assert counts == [1, 0]
        await box.close()
        await live.end.close()

    with broker(tmp_path) as one:
        asyncio.run(scene(one.url))
    assert caplog.text.count("is not told to gateways") == 1 and row_key("a", "m") in caplog.text
