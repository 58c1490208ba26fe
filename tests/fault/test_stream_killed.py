"""R1c: kill -9 a worker in the middle of a streamed answer: one error, no replay; before its first part nobody sees."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.engine.local.client import Client
from ipc import deadline
from ipc.errors import InputRefused, WorkerCrashed, WorkerLost
from ipc.wire.streams import WINDOW
from tests.fakes.holding import BEGUN, holding
from tests.fault import rounds
from tests.harness.decoupled import MODEL, Events, message, number_of
from tests.harness.rpc import Rpc, address_of, grpc_settings
from tests.harness.server import Server, serving, wait_until
from tests.harness.streams import all_of, asking, record_of, rest_of
from tests.harness.tensors import read
from tests.harness.worker import Workers, parts, workers
from tests.tiny.programs import write_repository

SETTINGS = {"limits__restart_wait_s": "40", "worker__hang_timeout_s": "20"}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Workers, Callable[[], list[str]]]]:
    """Two workers with a decoupled model, and what it has noted."""
    record = tmp_path / "steps"
    with workers(tmp_path, {"parts": parts(record=str(record))}, count=2, **SETTINGS) as running:
        yield running, record_of(record)


def use(running: Workers, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Do `work` with a client that is joined to all workers."""

    async def run() -> None:
        async with running.client() as client:
            await work(client)
            assert client.inputs.used_nbytes == 0
            assert all(not channel.streams and not channel.cost for channel in client.channels)

    asyncio.run(run())


def busy_slot(client: Client) -> int:
    """The worker that has the only request."""
    [slot] = [channel.slot for channel in client.channels if channel.streams]
    return slot


def test_a_stream_ends_with_one_error_and_is_not_run_again(
    two: tuple[Workers, Callable[[], list[str]]],
) -> None:
    running, steps = two

    async def work(client: Client) -> None:
        with await client.stream(*asking("parts", 1000, sleep_ms=20)) as stream:
            seen = [int(read(await anext(stream))["OUTPUT0"][0]) for _ in range(3)]
            running.kill(busy_slot(client))
            with pytest.raises(WorkerLost, match="in the middle of its answer"):
                async for reply in stream:
                    seen.append(int(read(reply)["OUTPUT0"][0]))
            assert seen == list(range(len(seen))), "parts that had arrived come first, each once"
            assert await rest_of(stream) == []
        assert steps().count("0") == 1, "it ran again"
        assert await all_of(client, asking("parts", 3)) == [0, 1, 2]

    use(running, work)
    forget_dead(running)


@pytest.mark.long
def test_a_stream_that_rests_is_lost_with_its_worker_and_told_so(
    two: tuple[Workers, Callable[[], list[str]]],
) -> None:
    running, steps = two

    async def work(client: Client) -> None:
        with await client.stream(*asking("parts", 1000)) as stream:
            await client.wait(lambda: len(steps()) == WINDOW, deadline.after(20))
            running.kill(busy_slot(client))
            with pytest.raises(WorkerLost):
                await rest_of(stream)
            assert await rest_of(stream) == []

    use(running, work)
    forget_dead(running)


def test_a_worker_killed_before_the_first_part_is_not_noticed(
    two: tuple[Workers, Callable[[], list[str]]], tmp_path: Path
) -> None:
    (running, steps), begun = two, tmp_path / f"steps{BEGUN}"

    async def work(client: Client) -> None:
        # NOTE: the first step takes long, so that the worker dies in it. The proof at load was a stream as well.
        begun.unlink(missing_ok=True)
        asked = asyncio.create_task(all_of(client, asking("parts", 3, sleep_ms=2000)))
        until = deadline.after(20)
        while not begun.exists():
            deadline.check(until, "before the first step began")
            await asyncio.sleep(0.01)
        assert steps() == []
        running.kill(busy_slot(client))
        assert await asked == [0, 1, 2]
        assert steps().count("0") == 1

    use(running, work)
    forget_dead(running)


@pytest.mark.long
def test_an_input_that_crashes_its_first_step_costs_two_workers_and_is_refused(
    two: tuple[Workers, Callable[[], list[str]]],
) -> None:
    running, _ = two

    async def work(client: Client) -> None:
        poison = asking("parts", 3, do="crash", at=0)
        with pytest.raises(WorkerCrashed):
            await client.stream(*poison)
        with pytest.raises(InputRefused):
            await client.stream(*poison)
        for slot in (0, 1):
            running.processes[slot].wait(60)
            running.start(slot)
        await client.wait(lambda: running._all_loaded(client), deadline.after(60))
        assert await all_of(client, asking("parts", 2)) == [0, 1]

    use(running, work)


@pytest.mark.long
def test_an_input_that_crashes_in_the_middle_of_its_stream_twice_is_refused(
    two: tuple[Workers, Callable[[], list[str]]], tmp_path: Path
) -> None:
    running, steps = two

    async def work(client: Client) -> None:
        asked = asking("parts", 9, do="crash", at=2, hold=str(tmp_path / "hold"))
        for _ in range(2):
            with holding(tmp_path) as hold, await client.stream(*asked) as stream:
                assert [int(read(await anext(stream))["OUTPUT0"][0]) for _ in range(2)] == [0, 1]
                hold.unlink()
                with pytest.raises(WorkerLost):
                    await rest_of(stream)
        assert steps() == ["0", "1"] * 2, "it was tried again"
        with pytest.raises(InputRefused):
            await client.stream(*asked)
        for slot in (0, 1):
            running.processes[slot].wait(60)
            running.start(slot)
        await client.wait(lambda: running._all_loaded(client), deadline.after(60))
        assert await all_of(client, asking("parts", 2)) == [0, 1]

    use(running, work)


def forget_dead(running: Workers) -> None:
    """The workers that are still to be stopped are those that live."""
    for slot in [slot for slot, process in running.processes.items() if process.poll() is not None]:
        running.processes.pop(slot)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One worker, which comes back by itself."""
    place = tmp_path_factory.mktemp("killed")
    settings = grpc_settings(
        **{
            "repository.dirs": write_repository(place / "models", [MODEL]),
            "repository.allow_python": "true",
            "worker.healthy_after_s": 0.5,
            "worker.heartbeat_timeout_s": 20,
            "limits.restart_wait_s": 40,
            "limits.load_wait_s": 40,
        }
    )
    with serving(place, ("fake/echo", "fake/slow"), settings) as running:
        yield running


def killed(server: Server) -> int:
    """Kill the worker; returns its pid."""
    pid: int = wait_until(server.worker_pid)
    os.kill(pid, signal.SIGKILL)
    return pid


# NOTE: every round has an input of its own. The second death on the same input would make the input poison.
def test_events_end_with_one_error(server: Server) -> None:
    for number in range(rounds(short=1, long=25)):
        with Events(server, 2000 + number, sleep_ms=5) as events:
            each = iter(events)
            seen = [next(each)]
            killed(server)
            seen += each
        assert [event.get("code") for event in seen] == [None] * (len(seen) - 1) + ["WORKER_LOST"]
        assert [event["OUTPUT"] for event in seen[:-1]] == list(range(len(seen) - 1))
        with Events(server, 3) as events:
            assert events.status == 200 and events.numbers() == [0, 1, 2]


def test_a_grpc_stream_tells_the_lost_request_once_and_goes_on(server: Server) -> None:
    for number in range(rounds(short=1, long=25)):
        with Rpc(address_of(server)) as rpc:
            answers = list(rpc.stream(_with_a_kill(server, 3000 + number)))
        lost = [answer for answer in answers if answer.error_message]
        assert [answer.infer_response.id for answer in lost] == ["lost"]
        assert "in the middle of its answer" in lost[0].error_message
        first = [
            number_of(answer)
            for answer in answers
            if answer.infer_response.id == "lost" and answer not in lost
        ]
        assert first == list(range(len(first)))
        assert [number_of(a) for a in answers if a.infer_response.id == "next"] == [0, 1, -1]


def _with_a_kill(server: Server, parts: int) -> Iterator[Any]:
    """A request of so many parts, the death of its worker once it has begun, and another request."""
    yield message(parts, "lost", sleep_ms=5)
    before = server.metric("penstock_stream_parts_total")
    wait_until(lambda: server.metric("penstock_stream_parts_total") > before, what="a beginning")
    pid = killed(server)
    wait_until(
        lambda: server.get("/readyz").status == 503 or server.worker_pid() not in (None, pid),
        what="the death to be noticed, or a successor",
    )
    yield message(2, "next", empty_final=True)
