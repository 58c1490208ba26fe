"""R22: callers with keys take turns by their shares, and a flood by one of them harms only itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.holding import holding
from tests.harness.keys import bearer, write_keys
from tests.harness.open_load import OpenLoad, Replies, Reply, percentile
from tests.harness.quiet import wait_quiet
from tests.harness.server import Answer, Server, serving, wait_until

MODEL = "fake/slow"
ASKED = 10
WAITING = 80
"""Requests of each key that wait for the device."""
LONG = "some longer text " * 15
"""With its number 264 characters: 67 tokens, 7 ms of the fake device beside the 20 ms of each batch."""
FLOODING = 300
"""Clients of the flood. A queue of 2 s holds about 170 of their requests."""
LEAST_SPARED = 40
"""Answers to the flood that a request of another caller waits less for than one of the flood does.

A request of another caller waits for three batches: the batch on the device, the one formed ahead, and its own. One of
the flood waits for the whole queue, of more than a hundred requests. What a busy client is late by is in both.
"""


def load(server: Server, key: str, text: str) -> OpenLoad:
    """Load that calls with a key."""
    return OpenLoad(server.port, MODEL, text, bearer(key))


@pytest.mark.long
def test_a_key_with_three_times_the_share_gets_three_times_the_throughput(tmp_path: Path) -> None:
    """The device is held until the requests of both keys wait, and notes whose requests it takes.

    A batch that is formed before the others have come may be of one key alone.
    """
    keys = write_keys(tmp_path / "keys.json", {"three": {"share": 3}, "one": {}, "busy": {}})
    batch, notes = 8, tmp_path / "notes"
    settings = {
        "server.keys_file": tmp_path / "keys.json",
        "server.frontends": 2,
        "batch.max_items": batch,
        "queue.min_tokens": 1 << 20,
    }
    with (
        serving(tmp_path, models=(MODEL,), settings=settings, supervised=False) as server,
        holding(tmp_path) as hold,
        ThreadPoolExecutor(2 * WAITING + 1) as pool,
    ):

        def ask(name: str, text: str) -> Future[Answer]:
            body = {"items": [{"text": text}]}
            return pool.submit(server.post, f"/v1/encode/{MODEL}", body, 60, **bearer(keys[name]))

        asked = [ask("busy", f"busy #note {notes} #hold {hold}")]
        wait_until(notes.exists, what="a busy device")
        asked += [ask(name, f"{name} #note {notes}") for name in ("three", "one") for _ in range(WAITING)]
        depth = 2 * WAITING - 2 * batch
        wait_until(lambda: server.metric("penstock_queue_depth") >= depth, what="requests of both keys")
        hold.unlink()
        assert {one.result().status for one in asked} == {200}
    turns = Counter(notes.read_text().split()[1 : WAITING + 1])
    assert abs(turns["three"] - 0.75 * WAITING) <= batch, turns


def test_a_flood_by_one_key_neither_refuses_nor_delays_another(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", {"flood": {}, "quiet": {}})
    settings = {
        "server.keys_file": tmp_path / "keys.json",
        "batch.max_items": 4,
        "queue.min_tokens": 1024,
        "queue.max_wait_s": 2.0,
    }

    async def measure(server: Server) -> tuple[Replies, Replies]:
        flood, quiet = load(server, keys["flood"], LONG), load(server, keys["quiet"], LONG)
        flooded, asked, refused, ended = Replies(), Replies(), asyncio.Event(), asyncio.Event()
        flooding = asyncio.create_task(flood.press(FLOODING, flooded, refused, ended))
        await refused.wait()
        for _ in range(ASKED):
            await quiet.ask(asked)
        ended.set()
        await flooding
        await flood.close()
        await quiet.close()
        return flooded, asked

    with serving(tmp_path, models=(MODEL,), settings=settings, supervised=False) as server:
        flooded, asked = asyncio.run(measure(server))
        assert not flooded.broken and not asked.broken
        assert {reply.code for reply in flooded.of(503)} == {"QUEUE_FULL"}
        assert len(asked.of(200)) == ASKED, [reply.body for reply in asked.replies]
        ended = [reply.ended for reply in flooded.of(200)]

        def median_wait(replies: list[Reply]) -> float:
            return percentile([sum(one.began < at < one.ended for at in ended) for one in replies], 0.5)

        quiet, flood = median_wait(asked.replies), median_wait(flooded.of(200))
        assert quiet + LEAST_SPARED <= flood, (quiet, flood)
        wait_quiet(server)
