"""Sequences through two real workers and two clients of them, as two frontends are."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from frontend.engine.local.client import Client
from ipc import deadline
from ipc.errors import InferenceFailed, InvalidInput, QueueFull, SequenceUnknown
from ipc.wire.messages import Step
from tests.harness.server import wait_until
from tests.harness.tensors import infer
from tests.harness.worker import Workers, totals, workers

SLOTS = 2
_names = itertools.count(1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Two workers with a model of two slots, one of one slot without batches, and one that forgets soon."""
    directory = tmp_path_factory.mktemp("sequences")
    models = {
        "sums": totals(SLOTS, record=str(directory / "sums")),
        "alone": totals(0, record=str(directory / "alone")),
        "hasty": totals(SLOTS, idle_s=0.2),
    }
    with workers(directory, models, count=2, queue__max_waiting_sequences=6) as found:
        yield found


def use(running: Workers, work: Callable[[list[Client]], Coroutine[Any, Any, None]]) -> None:
    """Do `work` with two clients."""

    async def run() -> None:
        async with running.client(0) as first, running.client(1) as second:
            await work([first, second])

    asyncio.run(run())


async def add(
    client: Client,
    name: int | str,
    number: int,
    *,
    start: bool = False,
    end: bool = False,
    model: str = "sums",
    **parameters: Any,
) -> int:
    """One request of a sequence; the total so far."""
    shape = (1,) if model == "alone" else (1, 1)
    given = {"INPUT0": ("INT32", np.full(shape, number, np.int32))}
    batches = model != "alone"
    step = Step(name, start, end)
    found = await infer(client, model, given, ["OUTPUT0"], batches=batches, step=step, parameters=parameters)
    assert found["OUTPUT0"].shape == shape
    return int(found["OUTPUT0"].reshape(-1)[0])


async def whole(clients: list[Client], name: int | str, numbers: list[int], model: str = "sums") -> list[int]:
    """One sequence, its requests from one client after the other."""
    last = len(numbers) - 1
    return [
        await add(clients[at % 2], name, number, start=not at, end=at == last, model=model)
        for at, number in enumerate(numbers)
    ]


def numbers_of(seed: int, count: int = 6) -> list[int]:
    """Drawn numbers."""
    return [int(number) for number in np.random.default_rng(seed).integers(-1000, 1000, count)]


@pytest.mark.parametrize("model", ["sums", "alone"])
def test_more_sequences_than_slots_from_both_frontends_get_their_own_totals(
    running: Workers, model: str
) -> None:
    async def work(clients: list[Client]) -> None:
        names = [next(_names) for _ in range(5)] + [f"text-{next(_names)}" for _ in range(5)]
        given = {name: numbers_of(at) for at, name in enumerate(names)}
        found = await asyncio.gather(*(whole(clients, name, given[name], model) for name in names))
        for name, totals_found in zip(names, found, strict=True):
            assert totals_found == list(itertools.accumulate(given[name]))

    use(running, work)
    lines = (running.log_path.parent / model).read_text().splitlines()
    batches = [line.split() for line in lines]
    assert {len(batch) for batch in batches} == {SLOTS if model == "sums" else 1}
    for batch in batches:
        named = [name for name in batch if name != "-"]
        assert len(set(named)) == len(named), "two requests of one sequence in one batch"
    if model == "sums":
        assert any("-" not in batch for batch in batches), "no two sequences shared a batch"


def test_requests_sent_without_waiting_run_in_their_order(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        name, numbers = next(_names), numbers_of(7, 20)
        sent = [
            asyncio.create_task(add(clients[0], name, number, start=not at, end=at == 19))
            for at, number in enumerate(numbers)
        ]
        assert await asyncio.gather(*sent) == list(itertools.accumulate(numbers))

    use(running, work)


def test_a_number_and_a_text_are_two_sequences(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        number = next(_names)
        for name, given in ((number, 1), (str(number), 10)):
            assert await add(clients[0], name, given, start=True) == given
        assert await add(clients[1], number, 2, end=True) == 3
        assert await add(clients[1], str(number), 20, end=True) == 30

    use(running, work)


def test_a_sequence_that_was_never_begun_or_has_ended_is_refused(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        name = next(_names)
        for start in (False, True):
            if start:
                await add(clients[0], name, 1, start=True, end=True)
            with pytest.raises(
                SequenceUnknown, match=f"for sequence {name} to model 'totals' must specify the START flag"
            ):
                await add(clients[1], name, 1)
        with pytest.raises(InvalidInput, match="non-zero correlation ID"):
            await add(clients[0], 0, 1, start=True)
        with pytest.raises(InvalidInput, match="129 characters, the limit is 128"):
            await add(clients[0], "x" * 129, 1, start=True)

    use(running, work)


def test_start_on_an_open_sequence_begins_anew_with_a_warning(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        name = next(_names)
        assert await add(clients[0], name, 1, start=True) == 1
        assert await add(clients[1], name, 5, start=True) == 5
        assert await add(clients[0], name, 2, end=True) == 7
        text = f"sequence {name} starts again"
        wait_until(lambda: text in running.log_path.read_text(), what="the warning")

    use(running, work)


def test_an_idle_sequence_loses_its_slot_which_is_logged_and_told(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        names = [next(_names) for _ in range(12)]
        started = await asyncio.gather(
            *(add(clients[0], name, 1, start=True, model="hasty") for name in names)
        )
        assert started == [1] * 12, "those that waited for a slot got one"
        await asyncio.to_thread(
            wait_until, lambda: str(names[0]) in _expired(running), what="the line in the log"
        )
        with pytest.raises(SequenceUnknown, match="of the sequence: it expired after 200000 microseconds"):
            await add(clients[1], names[0], 1, model="hasty")

    use(running, work)


def _expired(running: Workers) -> set[str]:
    """The sequences that the log says have expired."""
    listed = re.findall(r"idle sequences expired: (.*)", running.log_path.read_text())
    return set(re.findall(r"[\w-]+", " ".join(listed)))


def test_a_start_that_fails_takes_what_was_sent_behind_it_along_and_leaks_no_state(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        before = [next(_names) for _ in range(2 * SLOTS)]
        for name in before:
            await add(clients[0], name, 1000, start=True, end=True)
        name = next(_names)
        sent = [
            asyncio.create_task(add(clients[0], name, 1, start=True, do="raise")),
            asyncio.create_task(add(clients[0], name, 2)),
        ]
        failed, void = await asyncio.gather(*sent, return_exceptions=True)
        assert isinstance(failed, InferenceFailed)
        assert isinstance(void, SequenceUnknown) and "START request did not succeed" in void.message
        assert await add(clients[1], name, 3, start=True) == 3
        with pytest.raises(InferenceFailed):
            await add(clients[0], name, 4, do="raise")
        assert await add(clients[0], name, 5, end=True) == 8

    use(running, work)


def test_the_backlog_is_bounded(running: Workers) -> None:
    async def work(clients: list[Client]) -> None:
        names = [f"crowd-{next(_names)}" for _ in range(60)]
        sent = [asyncio.create_task(add(clients[0], name, 1, start=True)) for name in names]
        until = deadline.after(20)
        while sum(task.done() for task in sent) < 60 - 2 * 6:
            deadline.check(until, "before the others were answered")
            await asyncio.sleep(0.01)
        refused = [task for task in sent if task.done() and task.exception() is not None]
        assert len(refused) == 60 - 2 * (SLOTS + 6)
        assert all("sequences wait for one" in str(task.exception()) for task in refused)
        assert all(isinstance(task.exception(), QueueFull) for task in refused)
        began = [name for name, task in zip(names, sent, strict=True) if task not in refused]
        ends = await asyncio.gather(*(add(clients[1], name, 1, end=True) for name in began))
        assert ends == [2] * len(began)

    use(running, work)


def test_suspects_run_in_batches_of_their_own_with_the_state_of_their_sequence(
    running: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(clients: list[Client]) -> None:
        for client in clients:
            monkeypatch.setattr(client.poison, "is_suspect", lambda *of: True)
        names = [next(_names) for _ in range(SLOTS)]
        for at in range(3):
            found = await asyncio.gather(
                *(add(clients[name % 2], name, name, start=at == 0, end=at == 2) for name in names)
            )
            assert found == [name * (at + 1) for name in names]

    use(running, work)
