"""Text that goes on to another process while its reader sleeps: what the reader still gets, and what is taken."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from frontend.engine.events import Finished, Text
from ipc.wire.streams import FINISHED, TEXT, WINDOW_NBYTES, CalledFunction, Finish, Start
from tests.unit.frontend.engine.test_local_generation import (
    NEVER_ON,
    Frontend,
    gathered,
    generating,
    on_loop,
    opening,
    turn,
)
from tests.unit.frontend.engine.test_streams_carried_on import packed, reading


class Relay:
    """Keeps what goes on."""

    def __init__(self) -> None:
        self.has_room = True
        self.told: list[tuple[Any, ...]] = []

    def pass_on(self, kind: int, choice: int, text: str, tokens: int, *rest: Any) -> None:
        """See `TextRelay.pass_on`."""
        self.told.append((kind, choice, text, tokens, rest[0]))


def test_text_goes_on_while_the_reader_sleeps_and_the_mark_does_not_tell_it_again(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker, relay = frontend.workers[0], Relay()
        async with generating(frontend) as (request, generation):
            await anext(generation)
            generation.mark()
            generation.pass_to(relay)
            worker.say((request, 0, "early"), ids={0: [1]})
            assert not relay.told, "nobody waits yet"
            events = await anext(generation)
            mark = generation.mark()
            assert events == [Text(0, "early", 1)] and mark is not None and mark.ids == [packed(1)]
            reader = await reading(generation)
            worker.say((request, 0, None), ids={0: [2]})
            worker.say((request, 0, "a"), ids={0: [3]})
            worker.say((request, 0, Finish("stop", None, 3)), ids={0: [4]})
            assert relay.told == [
                (TEXT, 0, "a", 1, packed(2, 3)),
                (FINISHED, 0, "", 0, packed(4)),
            ]
            mark = generation.mark()
            assert mark is not None and mark.ids == [b""]
            worker.end(request)
            [end] = await reader
            assert (end.prompt_tokens, end.completion_tokens) == (5, 3)  # type: ignore[union-attr]

    on_loop(tmp_path, work)


def test_calls_and_text_behind_them_go_to_the_reader_in_order(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker, relay = frontend.workers[0], Relay()
        async with generating(frontend) as (request, generation):
            await anext(generation)
            generation.pass_to(relay)
            reader = await reading(generation)
            worker.say((request, 0, CalledFunction("f")), (request, 0, True), (request, 0, "behind"))
            worker.say((request, 0, Finish("stop", None, 3)))
            worker.end(request)
            events = await reader
            assert not relay.told and events[2:-1] == [Text(0, "behind", 1), Finished(0, "stop", None, 3)]

    on_loop(tmp_path, work)


def test_without_room_text_goes_to_the_reader_and_only_taken_text_is_told_to_the_worker(
    tmp_path: Path,
) -> None:
    async def work(frontend: Frontend) -> None:
        worker, relay = frontend.workers[0], Relay()
        async with generating(frontend) as (request, generation):
            await anext(generation)
            generation.pass_to(relay)
            reader = await reading(generation)
            half = "x" * (WINDOW_NBYTES // 2)
            worker.say((request, 0, half))
            await turn()
            assert worker.taken == [{request: len(half)}] and len(relay.told) == 1
            relay.has_room = False
            worker.say((request, 0, half))
            await turn()
            assert len(worker.taken) == 1 and len(relay.told) == 1
            reader.cancel()

    on_loop(tmp_path, work)


def test_a_run_that_follows_a_lost_one_begins_with_a_list(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        relay = Relay()
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            first.say((first.asked[-1].id, 0, Start(5, 3)))
            generation = await task
            await anext(generation)
            generation.pass_to(relay)
            waiting = await reading(generation)
            first.say((first.asked[-1].id, 0, "a"), ids={0: [1]})
            first.die()
            await turn()
            request = second.asked[-1].id
            second.say((request, 0, 5), (request, 0, Start(5, 4)))
            await turn()
            second.say((request, 0, "b"), ids={0: [2]})
            second.say((request, 0, "c"), ids={0: [3]})
            second.say((request, 0, Finish("stop", None, 2)))
            second.end(request)
            events = await waiting
            assert [each[2] for each in relay.told] == ["a"]
            assert events[:2] == [Text(0, "b", 1), Text(0, "c", 1)]

    on_loop(tmp_path, work)


def test_a_text_without_marks_goes_on_without_ids(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker, relay = frontend.workers[0], Relay()
        async with generating(frontend) as (request, generation):
            await anext(generation)
            generation.pass_to(relay)
            reader = await reading(generation)
            worker.say((request, 0, "a"))
            assert relay.told == [(TEXT, 0, "a", 1, None)]
            worker.say((request, 0, Finish("stop", None, 1)))
            worker.end(request)
            await reader
            assert await gathered(generation) == []

    on_loop(tmp_path, work, NEVER_ON)
