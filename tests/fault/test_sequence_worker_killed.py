"""Kills of workers that hold sequences: their state is lost and said to be, that of others is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from frontend.engine.local.client import Client
from ipc import deadline
from ipc.errors import InputRefused, SequenceLost, SequenceUnknown
from tests.harness.worker import Workers, totals, workers
from tests.process.test_sequence_workers import add

SETTINGS = {"limits__restart_wait_s": "30"}
NAMES = range(1, 21)


def use(running: Workers, work: Callable[[list[Client]], Coroutine[Any, Any, None]]) -> None:
    """Do `work` with two clients, as two frontends are."""

    async def run() -> None:
        async with running.client(0) as first, running.client(1) as second:
            await work([first, second])

    asyncio.run(run())


async def until_up(clients: list[Client], count: int) -> None:
    """Both clients see so many workers with the model."""
    for client in clients:
        await client.wait(
            lambda client=client: (
                sum(
                    channel.responsive and channel.models["sums"].state == "loaded"
                    for channel in client.channels
                    if "sums" in channel.models
                )
                == count
            ),
            deadline.after(40),
        )


async def totals_or_errors(clients: list[Client], **step: Any) -> dict[int, int | Exception]:
    """One more request of every sequence, from either client."""
    found = await asyncio.gather(
        *(add(clients[name % 2], name, name, **step) for name in NAMES), return_exceptions=True
    )
    assert all(isinstance(one, int | Exception) for one in found)
    return dict(zip(NAMES, found, strict=True))  # type: ignore[arg-type]


def test_only_the_sequences_of_the_killed_worker_are_lost_and_begin_again_when_it_comes_back(
    tmp_path: Path,
) -> None:
    with workers(tmp_path, {"sums": totals(32)}, count=2, **SETTINGS) as running:

        async def work(clients: list[Client]) -> None:
            began = await totals_or_errors(clients, start=True)
            assert began == {name: name for name in NAMES}
            running.kill(0)
            await until_up(clients, 1)
            after = await totals_or_errors(clients)
            lost = {name for name, found in after.items() if not isinstance(found, int)}
            assert 0 < len(lost) < len(NAMES), "the sequences were not spread over the workers"
            assert all(isinstance(after[name], SequenceUnknown) for name in lost)
            assert all(after[name] == 2 * name for name in NAMES if name not in lost)
            first, *rest = lost
            starting = asyncio.create_task(add(clients[0], first, first, start=True))
            running.start(0)
            assert await starting == first, "the START did not wait for the worker"
            assert await add(clients[1], first, first) == 2 * first, "the frontend did not wait for its join"
            await until_up(clients, 2)
            for name in rest:
                assert await add(clients[0], name, name, start=True) == name
                assert await add(clients[1], name, name) == 2 * name
            assert await totals_or_errors(clients) == {name: 3 * name for name in NAMES}
            again = await totals_or_errors(clients, start=True)
            assert again == {name: name for name in NAMES}
            running.kill(0)
            await until_up(clients, 1)
            for name, found in (await totals_or_errors(clients, end=True)).items():
                if name in lost:
                    assert isinstance(found, SequenceUnknown), (name, found)
                else:
                    assert found == 2 * name

        use(running, work)
        running.processes.pop(0)


def test_a_frontend_that_has_yet_to_join_the_only_worker_waits_and_says_at_once_that_a_dead_one_has_lost_all(
    tmp_path: Path,
) -> None:
    with workers(
        tmp_path, {"sums": totals(4)}, count=1, **SETTINGS | {"limits__restart_wait_s": "3600"}
    ) as running:

        async def work(clients: list[Client]) -> None:
            first, second = clients
            assert await add(first, 1, 5, start=True) == 5
            running.kill(0)
            await until_up(clients, 0)
            for client in clients:
                with pytest.raises(SequenceUnknown, match="its worker has gone"):
                    await add(client, 1, 5)
            joining = second.workers.tick
            second.workers.tick = lambda: None  # type: ignore[method-assign]
            running.start(0)
            assert await add(first, 2, 5, start=True) == 5
            going_on = asyncio.create_task(add(second, 2, 6))
            assert not (await asyncio.wait([going_on], timeout=0.3))[0], "it was answered before the join"
            second.workers.tick = joining  # type: ignore[method-assign]
            assert await going_on == 11
            with pytest.raises(SequenceUnknown, match="did not begin here"):
                await add(second, 1, 5)

        use(running, work)


@pytest.mark.long
def test_a_request_on_a_killed_worker_is_not_tried_elsewhere_and_says_why(tmp_path: Path) -> None:
    record = tmp_path / "batches"
    with workers(tmp_path, {"sums": totals(32, record=str(record))}, count=2, **SETTINGS) as running:

        async def work(clients: list[Client]) -> None:
            began = await totals_or_errors(clients, start=True)
            assert began == {name: name for name in NAMES}
            before = record.read_text().splitlines()
            with pytest.raises(SequenceLost, match="the state of sequence 7, which must begin again"):
                await add(clients[0], 7, 1, do="crash")
            after = record.read_text().splitlines()[len(before) :]
            assert sum("7" in line.split() for line in after) == 1, "it ran again"
            with pytest.raises(SequenceUnknown, match="must specify the START flag"):
                await add(clients[1], 7, 1)
            (dead,) = (slot for slot, process in running.processes.items() if process.poll() is not None)
            running.start(dead)
            assert await add(clients[1], 7, 1, start=True) == 1

        use(running, work)


@pytest.mark.long
def test_a_start_that_kills_its_worker_every_time_is_refused(tmp_path: Path) -> None:
    """Under whatever id it comes; others begin as ever."""
    with workers(tmp_path, {"sums": totals(4)}, count=1, **SETTINGS) as running:

        async def work(clients: list[Client]) -> None:
            client = clients[0]
            for name in (1, 2):
                with pytest.raises(SequenceLost):
                    await add(client, name, 7, start=True, do="crash")
                running.processes[0].wait(60)
                running.start(0)
                await client.ready("sums", deadline.after(60))
            with pytest.raises(InputRefused):
                await add(client, 3, 7, start=True, do="crash")
            assert await add(client, 4, 8, start=True) == 8
            assert await add(client, 4, 8, end=True) == 16

        use(running, work)
