"""Streams whose worker is lost or leaves while writing, with workers that a test plays behind real channels."""

from __future__ import annotations

import asyncio
import re
from array import array
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Finished,
    Generation,
    Started,
    Text,
)
from frontend.engine.local.retry import Attempts
from frontend.engine.streams import carrying, delta_stream
from frontend.engine.streams.delta_stream import TRIAL_TOKENS, Gap, KeptIds, Progress
from ipc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InputRefused,
    InvalidInput,
    LoraLoading,
    NoReplica,
    PenstockError,
    WorkerCrashed,
    WorkerLost,
)
from ipc.wire import messages
from ipc.wire.messages import GenerateCall, Leaving, ModelStatus, Submit
from ipc.wire.streams import CalledFunction, Finish, Start
from tests.fakes.clock import Clock
from tests.fakes.text_worker import TextWorker, Written
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


def packed(*ids: int) -> bytes:
    """Ids as they travel."""
    return array("I", ids).tobytes()


def written(asked: Submit) -> tuple[list[bytes], list[bool]]:
    """What a worker got of the text."""
    assert asked.written is not None
    return asked.written.choices, asked.written.ended


def outcomes(frontend: Frontend) -> dict[str, float]:
    """How texts went on, without zeros."""
    names = ("carried", "moved", "adopted", "refused", "unkept", "failed")
    counts = {name: frontend.value("continuations", name) for name in names}
    return {name: count for name, count in counts.items() if count}


async def reading(generation: Generation) -> asyncio.Task[list[Event]]:
    """The reader waits for the next events."""
    task = asyncio.ensure_future(anext(generation))
    await turn()
    return task


async def opened(generation: Generation) -> None:
    """The reader has the beginning."""
    assert await anext(generation) == [Started(5, 3)]


def goes_on(worker: TextWorker) -> int:
    """A worker begins with the rest of a text; returns the request there."""
    request = worker.asked[-1].id
    worker.say((request, 0, 5))
    worker.say((request, 0, Start(5, 4)))
    return request


def writes(worker: TextWorker, request: int, number: int = TRIAL_TOKENS) -> None:
    """A worker writes so many tokens."""
    for token in range(number):
        worker.say((request, 0, "x"), ids={0: [token]})


def test_the_parts_of_a_gap_add_up_to_the_time_without_a_token() -> None:
    gap = Gap(1_000_000)
    gap.sent(3_000_000)
    gap.prepared(10_000_000)
    gap.started(waited_ns=4_000_000)
    assert not gap.over_ns
    gap.ended(25_000_000)
    gap.ended(99_000_000)
    assert gap.over_ns == 25_000_000
    assert str(gap) == "resend 2.0 ms, prepare 7.0 ms, wait 4.0 ms, prefill 11.0 ms"


def test_the_log_tells_the_parts_of_a_gap_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            task = await reading(generation)
            first.die()
            await turn()
            later = goes_on(second)
            await turn()
            assert not caplog.messages
            writes(second, later, 2)
            await task
            writes(second, later, 2)
            await anext(generation)

    with caplog.at_level("INFO", logger=carrying.__name__):
        on_loop(tmp_path, work)
    (message,) = caplog.messages
    assert re.fullmatch(
        r"worker-1 goes on with a text: (resend|prepare|wait|prefill) .*, prefill [\d.]+ ms", message
    )


def test_the_rest_of_a_text_is_written_by_another_worker(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend, n=2) as (request, generation):
            await opened(generation)
            first.say((request, 0, "a"), (request, 1, "b"), ids={0: [1, 2], 1: [70000]})
            first.say((request, 1, CalledFunction("f")), ids={0: [4]})
            first.say((request, 1, Finish("tool_calls", None, 2)), (request, 0, None), ids={1: [5]})
            events = await anext(generation)
            assert [type(each) for each in events] == [Text, Text, CallBegun, Finished]
            task = await reading(generation)
            first.die(request)
            await turn()
            [asked] = second.asked
            assert written(asked) == ([packed(1, 2, 5), packed(70000, 4)], [False, True])
            assert asked.work.call == first.asked[0].work.call and asked.solo and not asked.apart
            again = goes_on(second)
            await turn()
            assert not task.done(), "the client knows of the beginning"
            second.say((again, 0, CalledFunction("g")), ids={0: [6]})
            second.say((again, 0, Finish("tool_calls", None, 5)))
            second.end(again)
            assert unnamed([*await task, *await gathered(generation)]) == [
                CallBegun(0, 0, "call-", "g"),
                Finished(0, "tool_calls", None, 5),
                Ended(5, 7, 0, 3),
            ]
        assert outcomes(frontend) == {"carried": 1}
        assert frontend.value("retries", "suspect") == 1

    on_loop(tmp_path, work)


def test_a_call_goes_on_within_its_arguments_and_the_next_has_the_next_number(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, CalledFunction("f")), (request, 0, Written('{"a"')), ids={1: [1]})
            first.die()
            assert unnamed(await anext(generation))[1:] == [
                CallBegun(0, 0, "call-", "f"),
                Arguments(0, '{"a"'),
            ]
            task = await reading(generation)
            again = goes_on(second)
            second.say((again, 0, Written(":1}")), (again, 0, True), (again, 0, CalledFunction("g")))
            assert unnamed(await task) == [
                Arguments(0, ":1}"),
                CallEnded(0),
                CallBegun(0, 1, "call-", "g"),
            ]

    on_loop(tmp_path, work)


def test_every_run_of_a_request_has_the_same_hidden_seed_and_other_requests_have_others(
    tmp_path: Path,
) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            first.die()
            await anext(generation)
            task = await reading(generation)
            second.say((goes_on(second), 0, "b"))
            await task
            seeds = [each.written.seed for each in (*first.asked, *second.asked) if each.written]
        first.revive()
        async with generating(frontend) as (request, generation):
            other = first.asked[-1].written
        assert len(seeds) == 2 and len(set(seeds)) == 1
        assert other is not None and other.seed != seeds[0] and not other.choices

    on_loop(tmp_path, work)


def test_a_text_that_was_held_back_goes_on_behind_its_known_tokens(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            first.say((request, 0, None), ids={0: [1, 2, 3]})
            task = await reading(generation)
            first.die(request)
            await turn()
            assert written(second.asked[0]) == ([packed(1, 2, 3)], [False])
            second.say((goes_on(second), 0, "abc"), ids={0: [4]})
            assert await task == [Text(0, "abc", 1, None)]

    on_loop(tmp_path, work)


def test_an_answer_that_lacks_only_the_word_that_it_is_done_ends_as_a_whole_one(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            first.say((request, 0, Finish("stop", None, 2)), ids={0: [2]})
            first.die(request)
            assert unnamed(await gathered(generation))[2:] == [
                Finished(0, "stop", None, 2),
                Ended(5, 2, 0, 3),
            ]
        assert not second.asked and not outcomes(frontend)

    on_loop(tmp_path, work)


def test_an_answer_whose_choices_have_ended_is_not_moved(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            first.say((request, 0, "a"), (request, 0, Finish("stop", None, 2)), ids={0: [1], 1: [2]})
            await anext(generation)
            task = await reading(generation)
            first.channel._dispatch(Leaving(), b"")
            look(first)
            await turn()
            assert not second.asked and not first.cancelled
            first.end(request)
            assert unnamed(await task) == [Ended(5, 2, 0, 3)]
        assert not outcomes(frontend)

    on_loop(tmp_path, work)


@pytest.mark.parametrize("error", [NoReplica("other"), LoraLoading("soon"), InvalidInput("no such adapter")])
def test_a_text_that_no_worker_can_go_on_with_ends_with_the_error_of_a_lost_worker(
    error: PenstockError, tmp_path: Path
) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            request = first.asked[-1].id
            first.say((request, 0, Start(5, weights="w")))
            generation = await task
            first.say((request, 0, Start(5, 3)), (request, 0, "a"), ids={1: [1]})
            await anext(generation)
            task = await reading(generation)
            first.die(request)
            await turn()
            asked = second.asked[0].written
            assert asked is not None and asked.weights == "w"
            second.fail(second.asked[0].id, error)
            with pytest.raises(WorkerLost, match="in the middle of its answer") as raised:
                await task
            assert type(raised.value.__cause__) is type(error)
        assert outcomes(frontend) == {"failed": 1}

    on_loop(tmp_path, work, {"limits.load_wait_s": "0.01"})


def test_a_client_that_leaves_while_its_text_waits_for_a_worker_counts_as_no_failure(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            second.die()
            task = await reading(generation)
            first.die(request)
            await turn()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not outcomes(frontend)

    on_loop(tmp_path, work)


def test_a_request_that_is_cancelled_as_it_begins_keeps_no_ids(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, _ = frontend.workers
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            request = first.asked[-1].id
            first.say((request, 0, 5), (request, 0, Start(5, 3)), (request, 0, "a"), ids={2: [1]})
            assert frontend.client.kept_ids.nbytes
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not frontend.client.kept_ids.nbytes

    on_loop(tmp_path, work)


def test_every_choice_has_to_pass_the_place_of_a_death() -> None:
    progress = Progress(GenerateCall(n=4), KeptIds(2, 1 << 20))
    for choice in range(3):
        progress.take(choice, packed(1))
    progress.end(2)
    progress.written()
    progress.take(0, packed(*range(TRIAL_TOKENS)))
    assert not progress.has_passed
    progress.take(1, packed(*range(TRIAL_TOKENS)))
    assert progress.has_passed
    progress.written()
    assert not progress.has_passed


def test_a_text_waits_for_its_adapter_anew_at_each_worker() -> None:
    attempts = Attempts(messages.Work("m", GenerateCall(), 1, 1, "r"))
    attempts.adapter_until_ns = 1
    attempts.go_on("files", 2, has_passed=True)
    assert not attempts.adapter_until_ns


def test_a_text_is_carried_on_twice_and_then_ends_with_one_error(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        workers = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            for at in (0, 1):
                writes(workers[at], request)
                await anext(generation)
                task = await reading(generation)
                workers[at].die(request)
                await turn()
                workers[at].revive()
                asked = workers[1 - at].asked[-1]
                assert asked.solo and not asked.apart, "the text has passed the place of the death before"
                request = goes_on(workers[1 - at])
                workers[1 - at].say((request, 0, "y"), ids={0: [9]})
                assert await task == [Text(0, "y", 1, None)]
            writes(workers[0], request)
            workers[0].die(request)
            await anext(generation)
            with pytest.raises(WorkerLost, match="in the middle of its answer"):
                await anext(generation)
            assert await gathered(generation) == []
        assert outcomes(frontend) == {"carried": 2, "refused": 1}

    on_loop(tmp_path, work)


def test_a_death_at_the_same_place_alone_is_proof_and_the_input_is_refused(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            task = await reading(generation)
            first.die(request)
            await turn()
            assert second.asked[0].solo
            second.die(goes_on(second), alone=True)
            with pytest.raises(WorkerCrashed, match="died twice"):
                await task
        first.revive()
        with pytest.raises(InputRefused):
            async with frontend.generate(frontend.scope(), frontend.work()):
                pass

    on_loop(tmp_path, work)


def test_a_death_in_company_soon_after_another_sets_the_text_apart(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            task = await reading(generation)
            first.die(request)
            await turn()
            first.revive()
            again = goes_on(second)
            writes(second, again, TRIAL_TOKENS - 1)
            await task
            task = await reading(generation)
            second.die(again)
            await turn()
            asked = first.asked[-1]
            assert asked.solo and asked.apart
            first.die(goes_on(first), alone=True)
            with pytest.raises(WorkerCrashed):
                await task

    on_loop(tmp_path, work)


def test_bystanders_of_deaths_are_no_suspects_and_go_on_more_often(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        workers = frontend.workers
        async with generating(frontend) as (request, generation):
            await opened(generation)
            workers[0].say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            task = await reading(generation)
            for at in (0, 1, 0, 1):
                workers[at].die()
                await turn()
                workers[at].revive()
                asked = workers[1 - at].asked[-1]
                assert not asked.solo and written(asked)[0] == [packed(1)]
            workers[0].say((goes_on(workers[0]), 0, "b"))
            assert await task == [Text(0, "b", 1, None)]

    on_loop(tmp_path, work)


def test_an_input_that_was_suspect_before_is_not_carried_on(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        frontend.client.retries.suspect_input(frontend.work(), None, False)
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            first.die(request)
            await anext(generation)
            with pytest.raises(WorkerLost, match="in the middle of its answer"):
                await anext(generation)
        assert not second.asked and outcomes(frontend) == {"refused": 1}
        assert frontend.client.poison.is_accused(MODEL, frontend.work().call)

    on_loop(tmp_path, work)


def test_a_death_that_no_reader_learns_of_makes_the_input_suspect(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, _ = frontend.workers
        async with generating(frontend) as (request, _):
            first.say((request, 0, "a"), ids={0: [1]})
            first.die(request)
            await turn()
        assert frontend.client.poison.is_suspect(MODEL, frontend.work().call)

    on_loop(tmp_path, work)


def test_only_a_worker_with_the_same_model_goes_on(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            second.channel.models = {MODEL: ModelStatus(MODEL, "loaded", identity="other files")}
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            task = await reading(generation)
            first.die(request)
            await turn()
            assert not second.asked and not task.done()
            first.revive()
            frontend.client.workers.changed()
            await turn()
            first.say((goes_on(first), 0, "b"))
            assert await task == [Text(0, "b", 1, None)]

    on_loop(tmp_path, work)


def test_without_a_worker_in_time_the_stream_ends_with_one_error(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            second.die()
            first.die(request)
            with pytest.raises(WorkerLost, match="in the middle of its answer") as raised:
                await anext(generation)
            assert isinstance(raised.value.__cause__, NoReplica)
        assert outcomes(frontend) == {"failed": 1}

    on_loop(tmp_path, work, {"limits.restart_wait_s": "0.01"})


def test_an_error_of_the_model_is_the_end(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            first.fail(request, InferenceFailed("no"))
            await anext(generation)
            with pytest.raises(InferenceFailed):
                await anext(generation)
        assert not second.asked and not outcomes(frontend)

    on_loop(tmp_path, work)


def test_ids_beyond_the_bound_are_not_kept_and_their_stream_ends_with_its_worker(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1, 2, 3]})
            assert frontend.value("continuation_bytes") == frontend.client.kept_ids.nbytes == 12
            first.say((request, 0, "b"), ids={0: [4]})
            assert frontend.value("continuation_bytes") == frontend.client.kept_ids.nbytes == 0
            first.die(request)
            await anext(generation)
            with pytest.raises(WorkerLost, match="in the middle of its answer"):
                await anext(generation)
        await turn()
        assert not second.asked and outcomes(frontend) == {"unkept": 1}
        assert frontend.client.poison.is_suspect(MODEL, frontend.work().call)

    on_loop(tmp_path, work, {"generation.continuation_bytes": "15"})


def test_without_continuations_workers_tell_no_ids(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with generating(frontend):
            assert frontend.workers[0].asked[0].written is None

    on_loop(tmp_path, work, NEVER_ON)


def look(worker: TextWorker) -> None:
    """A tick of the channel."""
    worker.channel.streams.look()


@pytest.mark.parametrize("leaves", ["worker", "model"])
def test_a_worker_or_a_model_that_leaves_hands_its_texts_over(leaves: str, tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            task = await reading(generation)
            look(first)
            await turn()
            assert not second.asked
            if leaves == "worker":
                first.channel._dispatch(Leaving(), b"")
            else:
                first.channel.models = {MODEL: ModelStatus(MODEL, "unloading")}
            look(first)
            await asyncio.sleep(0.1)
            assert first.cancelled == [request]
            first.say((request, 0, "late"), ids={0: [2]})
            [asked] = second.asked
            assert written(asked)[0] == [packed(1)] and not asked.solo
            second.say((goes_on(second), 0, "b"))
            assert await task == [Text(0, "b", 1, None)]
        assert outcomes(frontend) == {"moved": 1}

    on_loop(tmp_path, work)


def test_a_worker_that_leaves_keeps_its_texts_until_another_has_the_model(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            second.channel.models = {MODEL: ModelStatus(MODEL, "loading")}
            first.channel._dispatch(Leaving(), b"")
            look(first)
            first.say((request, 0, "a"), ids={0: [1]})
            await anext(generation)
            assert not first.cancelled
            second.channel.models = {MODEL: ModelStatus(MODEL, "loaded")}
            task = await reading(generation)
            look(first)
            await turn()
            assert first.cancelled == [request]
            second.say((goes_on(second), 0, "b"))
            assert await task == [Text(0, "b", 1, None)]

    on_loop(tmp_path, work)


def test_a_slow_reader_keeps_no_worker_from_leaving(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            first.channel._dispatch(Leaving(), b"")
            look(first)
            assert first.cancelled == [request] and not second.asked
            assert (await anext(generation))[1:] == [Text(0, "a", 1, None)]
            task = await reading(generation)
            second.say((goes_on(second), 0, "b"))
            assert await task == [Text(0, "b", 1, None)]

    on_loop(tmp_path, work)


def test_the_first_token_behind_a_death_has_as_long_as_the_first_of_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(delta_stream, "time", clock)

    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"), ids={0: [1]})
            first.die()
            await anext(generation)
            task = await reading(generation)
            goes_on(second)
            stream = next(iter(second.channel.streams.texts.values()))
            now_ns, first_ns = clock.monotonic_ns(), 3600 * 10**9
            stream.look(now_ns + first_ns // 2)
            await turn()
            assert not task.done()
            stream.look(now_ns + 2 * first_ns)
            with pytest.raises(DeadlineExceeded, match="no worker went on"):
                await task

    on_loop(tmp_path, work)


def test_what_was_written_travels_as_bytes(tmp_path: Path) -> None:
    struct = messages.Written(7, [packed(1, 2)], [False])
    again: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(struct), type=messages.Written)
    assert again == struct and len(msgspec.msgpack.encode(struct)) < 50
