"""Generated text on its way through a frontend, with a worker that a test plays behind the real channel."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import zmq

from frontend import scope as scope_module
from frontend.access.gate import Grant
from frontend.access_log import UNMATCHED
from frontend.engine import events
from frontend.engine.caching import Front
from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Finished,
    Generation,
    Past,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from frontend.engine.local import channel as channel_module
from frontend.engine.local import outstanding
from frontend.engine.local.channel import EXPIRE_GRACE_NS, Channel
from frontend.engine.local.client import Client
from frontend.engine.local.engine import LocalEngine
from frontend.engine.planning import pace_of
from frontend.engine.streams import delta_stream, homes
from frontend.engine.streams.delta_stream import TELL_AFTER
from frontend.records.finishing import Recorder
from frontend.scope import RequestScope, scope_of_ids
from frontend.server.drain import Drain
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InputRefused,
    PenstockError,
    WorkerCrashed,
    WorkerLost,
)
from ipc.metrics.families import NO_KEY
from ipc.metrics.registry import FrontendMetrics
from ipc.settings import load
from ipc.store.store import Store
from ipc.wire.messages import GenerateCall, Submit, Work
from ipc.wire.streams import (
    LOGPROB_NBYTES,
    WINDOW_NBYTES,
    CalledFunction,
    Finish,
    PromptToken,
    Start,
    TokenLogprob,
)
from tests.fakes.clock import Clock
from tests.fakes.text_worker import TextWorker, Written

MODEL = "m"
CALL = next(
    call
    for call in (GenerateCall(text=f"prompt {number}") for number in count())
    if homes.home((0, 1), MODEL, homes.beginning_of(call)) == 0
)
"""A call that goes to the first worker."""


class Frontend:
    """The engine of a frontend with two workers that a test plays."""

    def __init__(self, root: Path, settings: Mapping[str, str]) -> None:
        (root / "run").mkdir()
        named = {"run.dir": str(root / "run"), "limits.restart_wait_s": "60", **settings}
        self.settings = load(None, named, {})
        self.metrics = FrontendMetrics()
        self.recorder = recorder = Recorder(self.metrics, {MODEL})
        self.settings.paths.store().mkdir()
        store = Store(self.settings.paths)
        self.client = Client(
            self.settings.paths,
            self.settings,
            "frontend-0",
            store,
            recorder.retried,
            on_carried=recorder.carried_on,
            on_kept=recorder.kept_ids,
        )
        self.engine = LocalEngine(self.settings, Catalog([]), self.client, Drain())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.workers = [self._worker(slot) for slot in range(2)]

    def _worker(self, slot: int) -> TextWorker:
        changed = self.client.workers.changed
        made = Channel(self.context, self.settings.paths, slot, "frontend-0", changed)
        self.client.channels.append(made)
        return TextWorker(made, MODEL)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left anywhere."""
        return all(
            not channel.streams and not channel.cost and not channel._pending
            for channel in self.client.channels
        )

    def value(self, family: str, *labels: str) -> float:
        """A counter, or the number of values in a histogram."""
        self.metrics.tally.flush()
        child = getattr(self.metrics, family)
        child = child.labels(*labels) if labels else child
        if hasattr(child, "_buckets"):
            return float(sum(bucket.get() for bucket in child._buckets))
        return float(child._value.get())

    def scope(self) -> RequestScope:
        """The scope of a request."""
        return scope_of_ids("", "", self.settings.limits)

    def generate(
        self, scope: RequestScope, work: Work, past: Past | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        """Run work within its own deadlines, as protocols do."""
        scope.deadline_ns, scope.start_by_ns = work.deadline_ns, work.start_by_ns
        pace = pace_of(scope, self.settings, self.recorder, MODEL)
        return Front(self.engine, self.recorder).generate(scope, work, pace, past)

    def work(self, start_by_s: float = 3600, deadline_s: float = 86400, **more: Any) -> Work:
        """A request."""
        call = msgspec.structs.replace(CALL, **more)
        return Work(
            MODEL, call, deadline.after(deadline_s), 16, "req", start_by_ns=deadline.after(start_by_s)
        )


NEVER_ON = {"generation.continuations": "0"}
"""No text is carried on."""


def on_loop(
    root: Path,
    test: Callable[[Frontend], Awaitable[None]],
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a test that is a coroutine; at its end no request is left anywhere."""

    async def run() -> None:
        frontend = Frontend(root, settings)
        async with asyncio.timeout(60):
            await test(frontend)
        await turn()
        assert frontend.is_idle and not frontend.client.kept_ids.nbytes
        frontend.client.channels.clear()
        await frontend.client.close()
        frontend.context.destroy(linger=0)

    asyncio.run(run())


async def turn() -> None:
    """Let everything happen that is due."""
    for _ in range(10):
        await asyncio.sleep(0)


async def opening(
    frontend: Frontend, stack: AsyncExitStack, work: Work, past: Past | None = None
) -> asyncio.Task[Generation]:
    """A request that has been sent."""
    context = frontend.generate(frontend.scope(), work, past)
    task = asyncio.ensure_future(stack.enter_async_context(context))
    await turn()
    return task


@asynccontextmanager
async def generating(frontend: Frontend, **more: Any) -> AsyncIterator[tuple[int, Generation]]:
    """(id at the first worker, generation) of a request that has started."""
    async with AsyncExitStack() as stack:
        task = await opening(frontend, stack, frontend.work(**more))
        request = frontend.workers[0].asked[-1].id
        frontend.workers[0].say((request, 0, Start(5, 3)))
        yield request, await task


async def gathered(generation: Generation) -> list[Event]:
    """All further events."""
    return [event async for events in generation for event in events]


def unnamed(events: Sequence[Event]) -> list[Event]:
    """`events` without what differs between runs: ids of calls behind their beginning, and times."""
    known = []
    for event in events:
        if isinstance(event, CallBegun):
            begin, number = event.id[:5], event.id[5:]
            assert re.fullmatch(
                r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", number
            )
            event = CallBegun(event.choice, event.index, begin, event.name, event.logprobs)
        elif isinstance(event, Ended):
            assert event.prompt_s > 0 and event.completion_s >= 0
            event = Ended(
                event.prompt_tokens, event.completion_tokens, event.reasoning_tokens, event.cached_tokens
            )
        known.append(event)
    return known


def test_events_come_in_order_with_sums_at_the_end(tmp_path: Path) -> None:
    logprobs = [TokenLogprob(7, b"a", -0.5)]

    async def work(frontend: Frontend) -> None:
        worker, scope = frontend.workers[0], frontend.scope()
        async with AsyncExitStack() as stack:
            context = frontend.generate(scope, frontend.work(n=2))
            task = asyncio.ensure_future(stack.enter_async_context(context))
            await turn()
            [asked] = worker.asked
            request = asked.id
            assert isinstance(asked.work.call, GenerateCall) and not task.done()
            worker.say((request, 0, Start(5, 3)))
            generation = await task
            assert await anext(generation) == [Started(5, 3)]
            worker.say((request, 0, "a"), (request, 1, "?why"), logprobs={0: logprobs})
            worker.say((request, 1, "b"), (request, 0, CalledFunction("f")), (request, 0, Written("{")))
            assert unnamed(await anext(generation)) == [
                Text(0, "a", 1, logprobs),
                Reasoning(1, "?why", 1, None),
                Text(1, "b", 1, None),
                CallBegun(0, 0, "call-", "f"),
                Arguments(0, "{"),
            ]
            worker.say((request, 0, Written("}")), (request, 0, True))
            worker.say((request, 0, CalledFunction("g", "call_")), (request, 1, CalledFunction("f")))
            worker.say((request, 0, False), (request, 1, True), logprobs={0: logprobs})
            worker.say((request, 0, Finish("tool_calls", None, 4)))
            last = asyncio.ensure_future(anext(generation))
            worker.say((request, 1, Finish("stop", "END", 6, 2)))
            worker.end(request)
            assert unnamed(await last) == [
                Arguments(0, "}"),
                CallEnded(0),
                CallBegun(0, 1, "call_", "g"),
                CallBegun(1, 0, "call-", "f"),
                CallEnded(0, False, logprobs),
                CallEnded(1),
                Finished(0, "tool_calls", None, 4),
                Finished(1, "stop", "END", 6, 2),
                Ended(5, 10, 2, 3),
            ]
            assert await gathered(generation) == []
        assert scope.phases["device"] == 7e-6 and not worker.cancelled
        assert frontend.value("first_token", MODEL) == 1
        assert frontend.value("between_tokens", MODEL) >= 2
        for name in ("first_token", "between_tokens"):
            by_route = frontend.value(f"rs_{name}", "POST", UNMATCHED, MODEL, "200")
            assert by_route == frontend.value(name, MODEL)
        assert frontend.value("cached_tokens", MODEL) == 3

    on_loop(tmp_path, work)


def test_a_generation_begins_with_its_prompt_tokenized_and_is_in_the_queue_until_it_starts(
    tmp_path: Path,
) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            request = first.asked[0].id
            first.say((request, 0, 5))
            generation = await task
            assert generation.prompt_tokens == 5 and first.channel.cost == 16
            reading = asyncio.ensure_future(anext(generation))
            await turn()
            assert not reading.done(), "nothing is told before the engine begins"
            first.die()
            await turn()
            again = second.asked[0].id
            second.say((again, 0, 5))
            second.say((again, 0, Start(5, 3)), (again, 0, "a"))
            assert await reading == [Started(5, 3), Text(0, "a", 1, None)]
            assert second.channel.cost == 0

    on_loop(tmp_path, work)


def test_a_call_that_only_counts_ends_with_the_tokens_of_its_prompt(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with generating(frontend, counts_only=True) as (request, generation):
            frontend.workers[0].end(request)
            assert unnamed(await gathered(generation)) == [Started(5, 3), Ended(5, 0, 0, 3)]
        assert frontend.value("first_token", MODEL) == 0

    on_loop(tmp_path, work)


def test_what_fails_before_the_prompt_is_accepted_is_raised_where_the_context_is_entered(
    tmp_path: Path,
) -> None:
    async def work(frontend: Frontend) -> None:
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            frontend.workers[0].fail(frontend.workers[0].asked[0].id, InferenceFailed("the model failed"))
            with pytest.raises(InferenceFailed):
                await task
        assert not frontend.workers[1].asked

    on_loop(tmp_path, work)


def test_a_model_that_fails_in_the_middle_raises_one_error_behind_what_has_come(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        async with generating(frontend) as (request, generation):
            frontend.workers[0].say((request, 0, "a"))
            frontend.workers[0].fail(request, InferenceFailed("the model failed"))
            assert await anext(generation) == [Started(5, 3), Text(0, "a", 1, None)]
            with pytest.raises(InferenceFailed):
                await anext(generation)
            assert await gathered(generation) == []

    on_loop(tmp_path, work)


def test_the_worker_learns_exactly_how_many_bytes_were_taken(tmp_path: Path) -> None:
    piece = "ä" * (TELL_AFTER // 8)

    async def work(frontend: Frontend) -> None:
        worker, taken = frontend.workers[0], 0
        async with generating(frontend) as (request, generation):
            await anext(generation)
            for _ in range(17):
                worker.say((request, 0, piece), (request, 0, "?x"))
                assert len(await anext(generation)) == 2
                taken += len(piece.encode()) + 2
                await turn()
            # The last list is still in use, and pieces below the bound are not worth a message.
            told = sum(each[request] for each in worker.taken)
            assert told <= taken - len(piece.encode()) - 2
            worker.say((request, 0, "."))
            await anext(generation)
            await turn()
            told = sum(each[request] for each in worker.taken)
            assert taken - TELL_AFTER < told <= taken
            assert told % (len(piece.encode()) + 2) == 0 and len(worker.taken) == 4

    on_loop(tmp_path, work)


def test_the_text_of_a_reader_that_comes_back_is_told_at_once(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with generating(frontend) as (request, generation):
            await anext(generation)
            worker.say((request, 0, "x" * WINDOW_NBYTES), (request, 0, "y"))
            assert not worker.taken
            assert len(await anext(generation)) == 2
            reading = asyncio.ensure_future(anext(generation))
            await turn()
            assert worker.taken == [{request: WINDOW_NBYTES + 1}]
            worker.say((request, 0, "end"))
            assert await reading == [Text(0, "end", 1, None)]

    on_loop(tmp_path, work)


def test_log_probabilities_count_as_taken_with_their_text(tmp_path: Path) -> None:
    token = TokenLogprob(7, b"x", -0.5, [(number, b"y", -2.0) for number in range(20)])

    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with generating(frontend) as (request, generation):
            await anext(generation)
            worker.say((request, 0, "x"), logprobs={0: [token] * 200})
            await anext(generation)
            reading = asyncio.ensure_future(anext(generation))
            await turn()
            assert worker.taken == [{request: 1 + 200 * 21 * LOGPROB_NBYTES}]
            worker.say((request, 0, "end"))
            await reading

    on_loop(tmp_path, work)


def test_a_stream_uses_credits_until_its_worker_has_started_on_it(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            request = worker.asked[0].id
            assert worker.channel.cost == worker.channel.cost_of(MODEL) == 16
            worker.say((request, 0, Start(5)))
            await task
            assert worker.channel.cost == worker.channel.cost_of(MODEL) == 0

    on_loop(tmp_path, work)


def test_leaving_ends_the_work_wherever_it_is(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            task.cancel()
            await turn()
            assert worker.cancelled == [worker.asked[0].id]
        async with generating(frontend) as (request, _):
            worker.say((request, 0, "a"))
        assert worker.cancelled[1:] == [request]
        async with generating(frontend) as (other, generation):
            reading = asyncio.ensure_future(gathered(generation))
            await turn()
            reading.cancel()
        assert worker.cancelled[2:] == [other]
        # What comes late is of nobody.
        worker.say((request, 0, "b"))
        worker.end(request)

    on_loop(tmp_path, work)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("suspect", [False, True])
def test_a_worker_that_dies_before_the_answer_begins_is_not_noticed(
    tmp_path: Path, started: bool, suspect: bool
) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work())
            request = first.asked[0].id
            if started:
                first.say((request, 0, Start(5, 0)))
                assert await anext(await task) == [Started(5, 0)]
                reading = asyncio.ensure_future(gathered(await task))
                await turn()
            first.die(*[request] * suspect)
            await turn()
            [again] = second.asked
            assert again.solo is suspect
            second.say((again.id, 0, Start(5, 4)))
            second.say((again.id, 0, "a"), (again.id, 0, Finish("stop", None, 2)))
            second.end(again.id)
            events = await (reading if started else gathered(await task))
            told = [Text(0, "a", 1, None), Finished(0, "stop", None, 2), Ended(5, 2, 0, 4)]
            assert unnamed(events) == ([] if started else [Started(5, 4)]) + told
        assert frontend.value("retries", "suspect" if suspect else "bystander") == 1

    on_loop(tmp_path, work)


def test_a_prompt_that_a_worker_tells_again_is_told_once(tmp_path: Path) -> None:
    tokens = [PromptToken(number, b"ab", 2 * number, -1.0) for number in range(4)]

    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, ("abab", tokens[:2])))
            assert await anext(generation) == [Started(5, 3), Prompted(0, "abab", tokens[:2])]
            reading = asyncio.ensure_future(gathered(generation))
            await turn()
            first.die()
            await turn()
            [again] = second.asked
            second.say((again.id, 0, Start(5, 0)), (again.id, 0, ("ab", tokens[:1])))
            second.say((again.id, 0, ("abababc", tokens[1:])), (again.id, 0, "a"))
            second.say((again.id, 0, Finish("length", None, 1)))
            second.end(again.id)
            piece, *rest = await reading
            assert piece == Prompted(0, "ababc", tokens[2:], 4, 2)
            assert rest[0] == Text(0, "a", 1, None)

    on_loop(tmp_path, work)


def test_a_client_that_does_not_read_its_prompt_holds_the_worker_back(tmp_path: Path) -> None:
    top = [(number, b"y", -2.0) for number in range(20)]
    tokens = [PromptToken(7, b"x", at, -0.5, top) for at in range(WINDOW_NBYTES // (21 * LOGPROB_NBYTES))]

    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with generating(frontend) as (request, generation):
            worker.say((request, 0, ("x" * len(tokens), tokens)))
            await anext(generation)
            assert not worker.taken
            worker.say((request, 0, "a"))
            await anext(generation)
            await turn()
            assert worker.taken == [{request: len(tokens) * (1 + 21 * LOGPROB_NBYTES)}]

    on_loop(tmp_path, work)


def test_without_continuations_a_worker_that_dies_in_the_middle_ends_the_stream_with_one_error(
    tmp_path: Path,
) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.say((request, 0, "a"))
            first.die()
            assert await anext(generation) == [Started(5, 3), Text(0, "a", 1, None)]
            with pytest.raises(WorkerLost, match="in the middle of its answer"):
                await anext(generation)
            assert await gathered(generation) == []
        assert not second.asked and not first.cancelled

    on_loop(tmp_path, work, NEVER_ON)


def test_an_input_on_which_workers_die_twice_is_refused(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            await anext(generation)
            first.die(request)
            reading = asyncio.ensure_future(anext(generation))
            await turn()
            second.die(second.asked[0].id)
            with pytest.raises(WorkerCrashed, match="died twice"):
                await reading
            assert await gathered(generation) == []
        first.revive()
        with pytest.raises(InputRefused):
            async with frontend.generate(frontend.scope(), frontend.work()):
                pass

    on_loop(tmp_path, work)


async def dies_in_the_middle(frontend: Frontend, *, alone: bool) -> Submit:
    """A worker dies on the same request behind its first token; returns how the worker was asked."""
    worker = frontend.workers[0]
    async with generating(frontend) as (request, generation):
        worker.say((request, 0, "a"))
        worker.die(request, alone=alone)
        with pytest.raises(WorkerLost, match="in the middle of its answer"):
            await gathered(generation)
    worker.revive()
    await turn()
    return worker.asked[-1]


def test_an_input_that_kills_workers_in_company_is_set_apart_and_then_refused(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        asked = [await dies_in_the_middle(frontend, alone=alone) for alone in (False, False, True)]
        assert [(each.solo, each.apart) for each in asked] == [(False, False), (True, False), (True, True)]
        with pytest.raises(InputRefused):
            await dies_in_the_middle(frontend, alone=True)

    on_loop(tmp_path, work, NEVER_ON)


def test_an_input_that_kills_two_workers_alone_is_refused(tmp_path: Path) -> None:
    async def work(frontend: Frontend) -> None:
        for _ in range(2):
            await dies_in_the_middle(frontend, alone=True)
        with pytest.raises(InputRefused):
            await dies_in_the_middle(frontend, alone=True)

    on_loop(tmp_path, work, NEVER_ON)


def test_an_input_that_kills_before_its_first_token_and_then_alone_behind_it_is_refused(
    tmp_path: Path,
) -> None:
    async def work(frontend: Frontend) -> None:
        first, second = frontend.workers
        async with generating(frontend) as (request, generation):
            first.die(request)
            reading = asyncio.ensure_future(gathered(generation))
            await turn()
            again = second.asked[-1].id
            second.say((again, 0, Start(5, 3)), (again, 0, "a"))
            second.die(again, alone=True)
            with pytest.raises(WorkerCrashed):
                await reading
        first.revive()
        with pytest.raises(InputRefused):
            async with frontend.generate(frontend.scope(), frontend.work()):
                pass

    on_loop(tmp_path, work)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of delivery, turned by hand."""
    made = Clock.of(outstanding, monkeypatch)
    monkeypatch.setattr(delta_stream, "time", made)
    monkeypatch.setattr(events, "time", made)
    made.now = deadline.after(0) / 1e9
    return made


async def fails(generation: Generation, error: type[PenstockError], match: str) -> None:
    """The generation ends with this error, once."""
    with pytest.raises(error, match=match):
        await anext(generation)
    assert await gathered(generation) == []


def test_a_waiting_reader_gets_an_error_when_no_token_comes(tmp_path: Path, clock: Clock) -> None:
    async def work(frontend: Frontend) -> None:
        worker, idle_s = frontend.workers[0], frontend.settings.generation.idle_timeout_s
        async with generating(frontend) as (request, generation):
            await anext(generation)
            worker.say((request, 0, "a"))
            await anext(generation)
            for _ in range(3):
                reading = asyncio.ensure_future(anext(generation))
                await turn()
                clock.now += 0.9 * idle_s
                worker.channel.streams.look()
                worker.say((request, 0, "b"))
                assert await reading == [Text(0, "b", 1, None)]
            # Text that waits for the end of a call is no silence.
            reading = asyncio.ensure_future(anext(generation))
            await turn()
            for _ in range(3):
                clock.now += 0.9 * idle_s
                worker.say((request, 0, None))
                worker.channel.streams.look()
            assert not reading.done()
            worker.say((request, 0, "c"))
            assert await reading == [Text(0, "c", 1, None)]
            # A client that does not read waits for nothing.
            clock.now += 10 * idle_s
            worker.channel.streams.look()
            failing = asyncio.ensure_future(
                fails(generation, DeadlineExceeded, r"no token came for 60 s \(gen")
            )
            await turn()
            worker.channel.streams.look()
            assert not worker.cancelled
            clock.now += idle_s + 0.001
            worker.channel.streams.look()
            await failing
            assert worker.cancelled == [request]

    on_loop(tmp_path, work)


def test_the_times_of_an_answer_are_seconds_until_its_first_token_and_from_there_to_its_last(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scope_module, "time", clock)
    monkeypatch.setattr(events, "time", clock)

    async def work(frontend: Frontend) -> None:
        worker, scope = frontend.workers[0], frontend.scope()
        scope.started = clock.now
        clock.now += 1
        async with AsyncExitStack() as stack:
            context = frontend.generate(scope, frontend.work())
            task = asyncio.ensure_future(stack.enter_async_context(context))
            await turn()
            request = worker.asked[0].id
            worker.say((request, 0, Start(5)))
            clock.now += 2
            worker.say((request, 0, "a"))
            clock.now += 4
            worker.say((request, 0, "b"))
            clock.now += 8
            worker.say((request, 0, Finish("stop", None, 3)))
            clock.now += 16
            worker.end(request)
            ended = (await gathered(await task))[-1]
        assert isinstance(ended, Ended)
        assert (ended.prompt_s, ended.completion_s) == pytest.approx((3, 12))
        frontend.metrics.tally.flush()
        assert frontend.metrics.first_token.labels(MODEL)._sum.get() == pytest.approx(3)
        assert frontend.metrics.between_tokens.labels(MODEL)._sum.get() == pytest.approx(12)

    on_loop(tmp_path, work)


@pytest.mark.parametrize("started", [False, True])
def test_the_first_token_has_a_time_of_its_own(tmp_path: Path, clock: Clock, started: bool) -> None:
    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        async with AsyncExitStack() as stack:
            task = await opening(frontend, stack, frontend.work(start_by_s=300))
            request = worker.asked[0].id
            if started:
                worker.say((request, 0, Start(5)))
                await anext(await task)
                failing = asyncio.ensure_future(fails(await task, DeadlineExceeded, "before the first token"))
                await turn()
            clock.now += 299
            worker.channel.streams.look()
            assert not worker.cancelled
            clock.now += 2
            worker.channel.streams.look()
            if started:
                await failing
            else:
                with pytest.raises(DeadlineExceeded, match="before the first token"):
                    await task
            assert worker.cancelled == [request]

    on_loop(tmp_path, work)


def test_a_deadline_bounds_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        earliest_ns = deadline.after(1000)
        async with generating(frontend, deadline_s=1000) as (request, generation):
            latest_ns = deadline.after(1000)
            worker.say((request, 0, "a"))
            clock = Clock.of(channel_module, monkeypatch)
            clock.now = earliest_ns / 1e9
            worker.channel._expire()
            assert not worker.cancelled
            clock.now = (latest_ns + EXPIRE_GRACE_NS) / 1e9 + 1
            worker.channel._expire()
            assert await anext(generation) == [Started(5, 3), Text(0, "a", 1, None)]
            await fails(generation, DeadlineExceeded, "the deadline passed")
            assert worker.cancelled == [request]

    on_loop(tmp_path, work)


def test_the_streams_of_one_message_get_their_own_and_are_told_of_together(tmp_path: Path) -> None:
    number, size = 300, TELL_AFTER

    async def work(frontend: Frontend) -> None:
        worker = frontend.workers[0]
        frontend.workers[1].channel.state = "absent"
        async with AsyncExitStack() as stack:
            tasks = [await opening(frontend, stack, frontend.work(text=str(n))) for n in range(number)]
            requests = [each.id for each in worker.asked]
            worker.say(*((request, 0, Start(request)) for request in requests))
            generations = [await task for task in tasks]
            assert [await anext(each) for each in generations] == [[Started(request)] for request in requests]
            reading = [asyncio.ensure_future(anext(each)) for each in generations]
            await turn()
            worker.say(*((request, 0, f"{request:{size}}") for request in requests))
            lists = await asyncio.gather(*reading)
            assert [int(events[0].text) for events in lists if isinstance(events[0], Text)] == requests
            reading = [asyncio.ensure_future(anext(each)) for each in generations]
            await turn()
            assert worker.taken == [dict.fromkeys(requests, size)]
            worker.say(*((request, 0, Finish("stop", None, 1)) for request in requests))
            for request in requests:
                worker.end(request)
            for events in await asyncio.gather(*reading):
                assert [type(event) for event in events] == [Finished, Ended]

    on_loop(tmp_path, work)


@pytest.mark.parametrize("key", ["team", ""])
def test_tokens_are_counted_for_the_key_of_the_caller(tmp_path: Path, key: str) -> None:
    async def work(frontend: Frontend) -> None:
        worker, scope = frontend.workers[0], frontend.scope()
        scope.grant = Grant(key)
        async with AsyncExitStack() as stack:
            context = frontend.generate(scope, frontend.work())
            task = asyncio.ensure_future(stack.enter_async_context(context))
            await turn()
            request = worker.asked[0].id
            worker.say((request, 0, Start(5, 3)))
            await task
            worker.say((request, 0, "a"), (request, 0, "?b"))
            assert frontend.value("tokens_by_key", key or NO_KEY, "out") == 2, (
                "a client that leaves is counted too"
            )
            worker.say((request, 0, Finish("stop", None, 3)))
        assert frontend.value("tokens_by_key", key or NO_KEY, "in") == 5
        assert frontend.value("tokens_by_key", key or NO_KEY, "out") == 3

    on_loop(tmp_path, work)
