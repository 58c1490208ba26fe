"""Delay, preferred sizes and ordering of models that batch dynamically, through a real worker."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.engine.local.client import Client
from ipc import deadline
from ipc.errors import DeadlineExceeded, InferenceFailed
from ipc.metrics import registry as metrics
from ipc.wire.messages import Work
from tests.fakes.holding import holding, is_waited_for
from tests.harness.tensors import call_of, infer, read, request_of
from tests.harness.worker import Options, Workers, program, tensor, workers

LONG_US = 25_000_000
"""A delay that no test waits for."""


def echo(**batching: Any) -> Options:
    """A program of at most eight rows that batches so."""
    return program(
        "echo",
        [tensor("INPUT0", "INT32", 1)],
        [tensor("OUTPUT0", "INT32", 1)],
        more={"dynamic_batching": batching},
    )


MODELS = {
    "full": echo(max_queue_delay_us=LONG_US),
    "preferred": echo(max_queue_delay_us=LONG_US, preferred_batch_sizes=[3, 5]),
    "bounded": echo(preferred_batch_sizes=[2, 4]),
    "soon": echo(max_queue_delay_us=300_000),
    "prompt": echo(),
    "ordered": echo(preserve_ordering=True),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """One worker with all of them; its batches are recorded.

    Bulk work never passes queries, and no batch is cut because its model was slow before.
    """
    directory = tmp_path_factory.mktemp("batching")
    models = {name: options | {"record": str(directory / name)} for name, options in MODELS.items()}
    with workers(directory, models, batch__starve_after_s=60, batch__turn_s=60) as found:
        yield found


def batches_of(running: Workers, model: str) -> list[list[int]]:
    """The rows of each request, for every batch of a model so far."""
    path = running.log_path.parent / model
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(rows) for rows in line.split()] for line in lines]


def use(running: Workers, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    """Do `work` with a client."""

    async def run() -> None:
        async with running.client() as client:
            await work(client)

    asyncio.run(run())


def asked(model: str, number: int, lane: str = "interactive", **parameters: Any) -> tuple[Work, Any]:
    """A request of one row, and its payload."""
    given = {"INPUT0": ("INT32", np.full((1, 1), number, np.int32))}
    call, payload = call_of(given, ["OUTPUT0"], parameters=parameters)
    return request_of(model, call, payload, lane=lane)


async def send(client: Client, request: tuple[Work, Any]) -> int:
    """The value that comes back."""
    return int(read(await client.call(*request))["OUTPUT0"][0, 0])


async def together(running: Workers, client: Client, model: str, count: int) -> None:
    """`count` requests of a model are answered in one batch, of which none is before the last was sent."""
    before = batches_of(running, model)
    first = [asyncio.create_task(send(client, asked(model, at))) for at in range(count - 1)]
    await infer(client, "prompt", {"INPUT0": ("INT32", np.zeros((1, 1), np.int32))}, ["OUTPUT0"])
    assert not any(task.done() for task in first), "one did not wait"
    last = await asyncio.wait_for(send(client, asked(model, count - 1)), 60)
    assert [*(await asyncio.wait_for(asyncio.gather(*first), 60)), last] == list(range(count))
    assert batches_of(running, model)[len(before) :] == [[1] * count]


@pytest.mark.parametrize(("model", "count"), [("full", 8), ("preferred", 3)])
def test_requests_wait_until_a_batch_is_full_while_other_models_go_on(
    running: Workers, model: str, count: int
) -> None:
    use(running, lambda client: together(running, client, model, count))


def test_a_lone_request_is_answered_after_the_delay(running: Workers) -> None:
    async def work(client: Client) -> None:
        began = time.monotonic()
        assert await send(client, asked("soon", 3)) == 3
        assert time.monotonic() - began >= 0.3

    use(running, work)


def test_a_deadline_within_the_delay_ends_the_request_and_frees_its_place(running: Workers) -> None:
    async def work(client: Client) -> None:
        work, payload = asked("full", 1)
        late = msgspec.structs.replace(work, deadline_ns=deadline.after(0.3)), payload
        with pytest.raises(DeadlineExceeded):
            await client.call(*late)
        await together(running, client, "full", 8)

    use(running, work)


def waiting(running: Workers, model: str) -> int:
    """Items of a model that wait for the device, as the worker last reported."""
    lines = metrics.render(running.paths).decode().splitlines()
    found = [re.match(rf'penstock_queue_depth\{{.*model="{model}".*\}} (\S+)', line) for line in lines]
    return sum(int(float(match[1])) for match in found if match)


async def _while_busy(running: Workers, client: Client, hold: Path, *requests: tuple[Work, Any]) -> list[int]:
    """All requests, of one model, wait before the device is free; their values in the order of the answers."""
    blocker = asyncio.create_task(send(client, asked("prompt", -1, hold=str(hold))))
    answers: list[int] = []

    async def note(request: tuple[Work, Any]) -> None:
        answers.append(await send(client, request))

    until = deadline.after(60)

    async def wait_for(reached: Callable[[], bool], what: str) -> None:
        while not reached():
            deadline.check(until, what)
            await asyncio.sleep(0.01)

    await wait_for(lambda: is_waited_for(hold), "before the device was busy")
    tasks = [asyncio.create_task(note(request)) for request in requests]
    model = requests[0][0].model
    await wait_for(lambda: waiting(running, model) == len(requests), "before all requests waited")
    await asyncio.to_thread(hold.unlink)
    await asyncio.gather(blocker, *tasks)
    return answers


def test_preferred_sizes_bound_batches_where_nothing_waits(running: Workers, tmp_path: Path) -> None:
    async def work(client: Client) -> None:
        before = batches_of(running, "bounded")
        with holding(tmp_path) as hold:
            await _while_busy(running, client, hold, *(asked("bounded", at) for at in range(7)))
        assert [len(batch) for batch in batches_of(running, "bounded")[len(before) :]] == [4, 2, 1]

    use(running, work)


@pytest.mark.parametrize(("model", "expected"), [("prompt", [2, 1]), ("ordered", [1, 2])])
def test_answers_keep_the_order_of_the_requests_only_where_that_is_configured(
    running: Workers, tmp_path: Path, model: str, expected: list[int]
) -> None:
    async def work(client: Client) -> None:
        # The shapes differ, so that they are two batches, of which the interactive one goes first.
        slow = asked(model, 1, "bulk", sleep_ms=100)
        two = {"INPUT0": ("INT32", np.full((8, 1), 2, np.int32))}
        quick = request_of(model, *call_of(two, ["OUTPUT0"]))
        with holding(tmp_path) as hold:
            assert await _while_busy(running, client, hold, slow, quick) == expected

    use(running, work)


def test_a_cancelled_request_and_one_that_fails_hold_no_later_answer_up(running: Workers) -> None:
    async def work(client: Client) -> None:
        gone = asyncio.create_task(send(client, asked("ordered", 1, "bulk", sleep_ms=200)))
        failing = asyncio.create_task(send(client, asked("ordered", 2, do="raise")))
        last = asyncio.create_task(send(client, asked("ordered", 3)))
        await asyncio.sleep(0)
        gone.cancel()
        assert await asyncio.wait_for(last, 60) == 3
        with pytest.raises(InferenceFailed):
            await asyncio.wait_for(failing, 60)

    use(running, work)
