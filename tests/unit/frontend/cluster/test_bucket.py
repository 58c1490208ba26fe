"""The bucket of models over a real broker: rows of boxes that are gone for ever go, rows of living boxes stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.js.errors import NoKeysError

from frontend.cluster import bucket as module
from frontend.cluster.broker import Broker
from frontend.cluster.bucket import Writer
from ipc.settings import Cluster
from ipc.wire.cluster import VERSION, BoxRow, Row
from ipc.wire.cluster_names import Names
from tests.harness.broker import broker
from tests.harness.server import eventually


def rows(box: str) -> dict[str, Row]:
    return {box: BoxRow(VERSION, box, "life", "default", "default", [], True, [])}


async def keys(end: Broker) -> set[str]:
    bucket = await end.client.jetstream().key_value(Names().models)
    try:
        return set(await bucket.keys())
    except NoKeysError:
        return set()


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
        assert await keys(end) == {"gone", "here"}

        async def only_here() -> bool:
            here.forget()
            assert await here.write(rows("here"))
            return await keys(end) == {"here"}

        await eventually(only_here, "the end of the rows of a box that is gone")
        await end.close()

    with broker(tmp_path) as one:
        asyncio.run(scene())
