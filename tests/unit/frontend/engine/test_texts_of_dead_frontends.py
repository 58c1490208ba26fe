"""Texts that another frontend has begun: marks tell how far, and the next frontend goes on behind all marks."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from frontend.engine.events import (
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Finished,
    Generation,
    Mark,
    Past,
    Reasoning,
    Started,
    Text,
)
from ipc.errors import InputRefused, InvalidInput, PenstockError, QueueFull, WorkerLost
from ipc.wire.streams import CalledFunction, Finish, Start
from tests.fakes.text_worker import TextWorker
from tests.unit.frontend.engine.test_local_generation import (
    MODEL,
    NEVER_ON,
    Frontend,
    gathered,
    generating,
    on_loop,
    opening,
    turn,
    unnamed,
)
from tests.unit.frontend.engine.test_streams_carried_on import outcomes, packed, written

TOLD: list[Event] = [
    Started(5, 3),
    Text(0, "ab", 2),
    Finished(1, "stop", None, 4, 1),
    CallBegun(0, 0, "call-1", "f"),
]


def past_of(
    events: list[Event], *ids: bytes, deaths: int = 0, moves: int = 1, weights: str = "", identity: str = ""
) -> Past:
    """What a frontend that has died leaves."""
    return Past(events, Mark(77, list(ids), weights, identity, deaths), moves)


async def taken_up(
    frontend: Frontend, stack: AsyncExitStack, past: Past, **more: object
) -> tuple[int, TextWorker, Generation]:
    """(request at the worker, the worker, generation) of a text that this frontend goes on with."""
    task = await opening(frontend, stack, frontend.work(**more), past)
    [worker] = [each for each in frontend.workers if each.asked]
    request = worker.asked[-1].id
    worker.say((request, 0, 5), (request, 0, Start(5, 4)))
    return request, worker, await task


def test_marks_tell_each_token_once_and_fit_the_events(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with generating(frontend, n=2) as (request, generation):
            await anext(generation)
            first = generation.mark()
            worker.say((request, 0, "a"), (request, 1, None), ids={0: [1, 2], 1: [3]})
            await anext(generation)
            second = generation.mark()
            worker.say((request, 0, "b"), (request, 1, "c"), ids={0: [4], 1: [5]})
            await anext(generation)
            third, fourth = generation.mark(), generation.mark()
            assert None not in (first, second, third, fourth)
            found = [each.ids for each in (first, second, third, fourth) if each is not None]
        assert found == [[b"", b""], [packed(1, 2), packed(3)], [packed(4), packed(5)], [b"", b""]]
        seeds = {each.seed for each in (first, second, third) if each is not None}
        assert seeds == {asked.written.seed for asked in worker.asked if asked.written}

    on_loop(tmp_path, work)


def test_a_text_that_is_never_carried_on_has_no_mark(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with generating(frontend) as (_, generation):
            await anext(generation)
            assert generation.mark() is None

    on_loop(tmp_path, work, NEVER_ON)


def test_a_text_goes_on_behind_the_tokens_of_another_frontend(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with AsyncExitStack() as stack:
            past = past_of(TOLD, packed(1, 2), packed(3, 4, 5, 6))
            request, worker, generation = await taken_up(frontend, stack, past, n=2)
            assert written(worker.asked[0]) == ([packed(1, 2), packed(3, 4, 5, 6)], [False, True])
            assert worker.asked[0].written is not None and worker.asked[0].written.seed == 77
            worker.say((request, 0, True), (request, 0, CalledFunction("g")), ids={0: [7]})
            worker.say((request, 0, Finish("tool_calls", None, 9, 2)), ids={0: [8]})
            events = await anext(generation)
            mark = generation.mark()
            worker.end(request)
            assert unnamed([*events, *await gathered(generation)]) == [
                CallEnded(0),
                CallBegun(0, 1, "call-", "g"),
                Finished(0, "tool_calls", None, 9, 2),
                Ended(5, 13, 3, 3),
            ]
            assert mark is not None and mark.ids == [packed(7, 8), b""] and mark.seed == 77

    on_loop(tmp_path, work)


def test_a_text_of_which_nothing_was_told_begins_with_the_same_seed(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with AsyncExitStack() as stack:
            request, worker, generation = await taken_up(frontend, stack, past_of([Started(5, 3)], b""))
            assert written(worker.asked[0]) == ([], [])
            assert worker.asked[0].written is not None and worker.asked[0].written.seed == 77
            worker.say((request, 0, "?why"), ids={0: [1]})
            assert await anext(generation) == [Reasoning(0, "?why", 1, None)], "the beginning was told"

    on_loop(tmp_path, work)


def test_deaths_of_frontends_and_of_workers_count_together(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with AsyncExitStack() as stack:
            past = past_of([Started(5, 3), Text(0, "a")], packed(1), deaths=1, moves=1)
            request, worker, generation = await taken_up(frontend, stack, past)
            mark = generation.mark()
            assert mark is not None and mark.deaths == 1
            worker.die(request)
            with pytest.raises(WorkerLost):
                await gathered(generation)
        assert outcomes(frontend) == {"refused": 1}

    on_loop(tmp_path, work)


@pytest.mark.parametrize(
    ("error", "settings"),
    [(QueueFull, {"generation.continuation_bytes": "4"}), (InvalidInput, {}), (InputRefused, {})],
)
def test_a_text_that_cannot_go_on_here_is_refused(
    error: type[PenstockError], settings: dict[str, str], tmp_path: Path
) -> None:
    async def work(frontend: Frontend) -> None:
        past = past_of([Started(5, 3), Text(0, "a")], packed(1, 2))
        asked = frontend.work(images=[b"another"] if error is InvalidInput else [])
        if error is InputRefused:
            frontend.client.poison.suspect(MODEL, asked.call)
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, asked, past)
            with pytest.raises(error):
                await task
        assert not any(worker.asked for worker in frontend.workers)
        await asyncio.sleep(0)

    on_loop(tmp_path, work, settings)


def test_no_model_goes_on_that_is_not_the_one_that_began(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        past = past_of([Started(5, 3), Text(0, "a")], packed(1), identity="another")
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work(start_by_s=0.2), past)
            with pytest.raises(PenstockError):
                await task
        await turn()
        assert not any(worker.asked for worker in frontend.workers)

    on_loop(tmp_path, work)
