"""Generated text inside a worker: turns, pauses, failures, and the end by whoever ends a job; no block is left over."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
import transformers
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ipc.errors import InferenceFailed, QueueFull
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Generation, Settings
from ipc.wire.messages import Ending, GenerateCall, Sampling, Written
from ipc.wire.streams import FINISHED, QUEUED, STARTED, Deltas
from tests.fakes.clock import Clock
from tests.fakes.generating import Modes, NotedMasks
from tests.fakes.jobs import make_job, replan
from tests.fakes.raising import EXCEPTIONS, LOGGED, obey
from workers import foreign
from workers.adapters.base import Prepared
from workers.endpoint.endpoint import Endpoint
from workers.generation.building import build
from workers.generation.request import GenerationRequest
from workers.generation.sampling import BatchedSampler
from workers.generation.scheduler import Sequence as Choice
from workers.generation.scheduler import Unseen
from workers.generation.text import ChoiceOutput
from workers.scheduling import bound
from workers.scheduling.context import Context
from workers.scheduling.job import Batch, Job
from workers.strategies import generation
from workers.strategies.generation import Generations

WINDOW = 40
CONTEXT = 64
RUNNING, WAITING = 4, 6
STEP_S = generation.TURN_S / 4
"""What a step takes on the clock, which nothing else moves."""

both = pytest.mark.usefixtures("both_modes_at_length")


class Letters:
    """A vocabulary in which token k is one letter."""

    silent: frozenset[int] = frozenset()
    marks: frozenset[int] = frozenset()

    def raw(self, token: int) -> bytes:
        return bytes([97 + token % 26])

    def detokenizer(self, before: Sequence[int] = ()) -> Any:
        return lambda token: "" if token is None else self.raw(token).decode()


class Model:
    """A tiny model that fails for prompts which begin with a token of `poison`, as a wrong input would."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(3)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
        )
        self.model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        self.poison: set[int] = set()
        self.fails = 0
        nbytes = blocks * 8 * 32 * 2 * 4
        settings = Generation(
            block_tokens=8,
            cache_bytes=nbytes,
            max_sequences=RUNNING,
            prefill_tokens=16,
            max_waiting=WAITING,
            run_ahead="always" if Modes.ahead else "never",
        )
        vocabulary: Any = Letters()
        self.engine = build(
            self.model,
            CONTEXT,
            settings,
            0,
            BatchedSampler(vocabulary.raw, lambda text: []),
            NotedMasks(),
            lambda request, choice: ChoiceOutput(vocabulary, request, choice),
        )
        plain = self.engine._forward

        def forward(spans: Any) -> torch.Tensor:
            cast("Clock", generation.time).now += STEP_S
            if self.fails:
                self.fails -= 1
                raise torch.OutOfMemoryError("out of memory, for this test")
            if any(span.sequence.tokens[0] in self.poison for span in spans):
                raise RuntimeError("this input breaks the model, for this test")
            return plain(spans)

        self.engine._forward = forward  # type: ignore[method-assign]

    def greedy(self, prompt: list[int], count: int) -> str:
        """The text of plain forward passes."""
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                ids.append(int(self.reference()(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return "".join(Letters().raw(token).decode() for token in ids[len(prompt) :])

    def reference(self) -> Any:
        """The same weights with the attention of transformers."""
        if not hasattr(self, "_reference"):
            self._reference = transformers.LlamaForCausalLM(self.model.config).eval()
            self._reference.load_state_dict(self.model.state_dict())
            self._reference.set_attn_implementation("sdpa")
        return self._reference


class Received:
    """An endpoint whose frontend notes what comes, and refuses what comes out of order."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], str] = {}
        self.queued: dict[int, int] = {}
        self.weights: dict[int, str] = {}
        self.written: dict[int, bytes] = {}
        self.started: dict[int, int] = {}
        self.finished: dict[tuple[int, int], str] = {}
        self.ends: dict[int, str] = {}
        self.wakes = 0
        self._posted: list[Any] = []

    def post(self, work: Any, wake: bool = True) -> None:
        self._posted.append(work)
        if wake:
            self.wake()

    def wake(self) -> None:
        """Everything that waits arrives now."""
        posted, self._posted = self._posted, []
        self.wakes += bool(posted)
        for work in posted:
            work()

    def deltas(self, key: bytes, deltas: Deltas) -> None:
        for at, (number, choice, kind) in enumerate(
            zip(deltas.ids, deltas.choices, deltas.kinds, strict=True)
        ):
            assert number not in self.ends, "an entry after the end"
            assert (number, choice) not in self.finished, "an entry after the end of its choice"
            if deltas.written:
                self.written[number] = self.written.get(number, b"") + deltas.written[at]
            if kind in (QUEUED, STARTED):
                told = self.queued if kind == QUEUED else self.started
                assert number not in told and number not in self.started, "a beginning comes once, in order"
                told[number] = deltas.starts[at].prompt_tokens
                self.weights.setdefault(number, deltas.starts[at].weights)
                assert self.queued.get(number, told[number]) == told[number]
                continue
            assert number in self.started, "an entry before the start"
            if kind == FINISHED:
                self.finished[number, choice] = deltas.finishes[at].reason
            else:
                self.texts[number, choice] = self.texts.get((number, choice), "") + deltas.texts[at]

    def reply(self, key: bytes, result: Any, block: Any, inline: Any) -> None:
        assert result.id not in self.ends
        self.ends[result.id] = "done"

    def fail(self, key: bytes, request: int, error: Any) -> None:
        assert request not in self.ends
        self.ends[request] = error.code


class Worker:
    """Queue, table and strategy of one worker, with a hand-driven device."""

    def __init__(self, blocks: int = 24) -> None:
        self.made = Model(blocks)
        self.received = Received()
        self.adapter: Any = Adapter(self.made.engine)
        self.flights: list[list[tuple[int, int]]] = []
        arena: Any = SimpleNamespace(record_flight=self.flights.append)
        settings = Settings(generation=Generation(max_waiting=WAITING))
        endpoint = cast("Endpoint", self.received)
        context = Context.make(settings, WorkerMetrics("worker-0"), arena, endpoint, 2048)
        self.queue, self.table, self.strategy = context.queue, context.jobs, Generations(context)
        self.jobs: list[Job] = []

    def submit(
        self,
        prompt: list[int],
        tokens: int = 4,
        n: int = 1,
        *,
        solo: bool = False,
        apart: bool = False,
        counts_only: bool = False,
        logprobs: int | None = None,
        caller: str = "",
        lora: str = "",
        written: Written | None = None,
    ) -> Job:
        """A request arrives and is prepared. Raises `QueueFull`."""
        ending, sampling = Ending(max_tokens=tokens), Sampling(logprobs=logprobs)
        call = GenerateCall(
            ids=prompt, n=n, sampling=sampling, ending=ending, counts_only=counts_only, lora=lora
        )
        deadline_ns = time.monotonic_ns() + 10**12
        number = len(self.jobs) + 1
        job = make_job(
            call, number=number, model="m", deadline_ns=deadline_ns, of=self.adapter, strategy=self.strategy
        )
        job.solo, job.apart, job.group, job.written = solo, apart, "m", written
        job.work = msgspec.structs.replace(job.work, caller=caller)
        self.strategy.check(job.work)
        self.queue.admit(job)
        try:
            self.strategy.admit(job)
        except QueueFull:
            self.queue.settle(job)
            raise
        request = GenerationRequest(None, prompt, call, tokens, frozenset())
        job.prepared = [Prepared(request, len(prompt))]
        job.output = cast("Any", SimpleNamespace(block=None, buffer=b"", arrays={}))
        self.table.enter(job)
        self.jobs.append(job)
        self.queue.put(job, 0, 1)
        return job

    def turn(self) -> bool:
        """What the device thread does with one batch; whether there was one."""
        for strategy in self.queue.take_asking():
            strategy.go_on()
        taken = self.queue.take(1 << 20, 64, lambda model: 1 << 20)
        pieces = self.table.claim_pieces(taken)
        if not pieces:
            return bool(taken)
        for piece in pieces:
            piece.job.first_run_ns = piece.job.first_run_ns or generation.time.monotonic_ns()
        batch = Batch(pieces, None, sum(piece.prepared.cost for piece in pieces), 0.0)
        self.strategy.run(batch)
        self.table.unclaim_pieces(pieces)
        self.strategy.after(batch)
        return True

    def read(self, job: Job) -> None:
        """The client of a job takes all that was sent."""
        ahead = job.strategy_state.flow.ahead
        if ahead and job.state == "open":
            self.strategy.taken(job, ahead)

    def settle(self) -> None:
        """Run until nothing is left to do; all clients read."""
        while self.turn() or self.queue.interrupted or len(self.table):
            for job in self.jobs:
                self.read(job)

    def assert_nothing_is_left(self) -> None:
        engine = self.made.engine
        self.strategy.go_on()
        assert not len(self.table) and not engine.has_work and not list(engine.keys)
        assert engine.statistics().blocks_used == 0
        assert self.queue.admitted == 0 and not self.queue.has_work and self.table.resting.total() == 0
        crowd = self.strategy._crowd(self.adapter)
        assert crowd.sequences == 0 and not crowd.jobs


class Adapter(SimpleNamespace):
    """What the strategy reads of an adapter."""

    def __init__(self, engine: Any) -> None:
        super().__init__(
            engine=engine, config=None, gathering=None, batch_tokens=None, identity="", tells_errors=False
        )

    __hash__ = object.__hash__


@pytest.fixture(autouse=True)
def window_and_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "WINDOW_NBYTES", WINDOW)
        Clock.of(generation, patch)
        yield


class Machine(RuleBasedStateMachine):
    """Requests, a device, clients that read, and somebody who ends requests, in any order."""

    @initialize(blocks=st.integers(9, 24))
    def begin(self, blocks: int) -> None:
        self.worker = Worker(blocks)
        self.poisoned: set[int] = set()

    @rule(
        length=st.integers(1, 40),
        tokens=st.integers(1, 24),
        n=st.integers(1, 3),
        first=st.integers(0, 5),
        degree=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def arrive(self, length: int, tokens: int, n: int, first: int, degree: int) -> None:
        prompt = [first, *(range(1, length))]
        try:
            self.worker.submit(prompt, min(tokens, CONTEXT - length), n, solo=degree > 0, apart=degree > 1)
        except QueueFull as error:
            assert error.retry_after_s is not None and error.retry_after_s >= 1
            assert self.worker.strategy._crowd(self.worker.adapter).sequences + n > RUNNING + WAITING

    @rule(times=st.integers(1, 3))
    def turns(self, times: int) -> None:
        for _ in range(times):
            self.worker.turn()

    @rule(which=st.integers(0, 50))
    def read(self, which: int) -> None:
        if self.worker.jobs:
            self.worker.read(self.worker.jobs[which % len(self.worker.jobs)])

    @rule(first=st.integers(0, 5))
    def poison(self, first: int) -> None:
        self.worker.made.poison.add(first)
        self.poisoned.add(first)

    @rule()
    def run_out_of_memory_once(self) -> None:
        self.worker.made.fails = 1

    @rule(which=st.integers(0, 50), how=st.sampled_from(["cancel", "fail", "expire"]))
    def end(self, which: int, how: str) -> None:
        if not self.worker.jobs:
            return
        job = self.worker.jobs[which % len(self.worker.jobs)]
        if how == "cancel":
            self.worker.table.cancel(job)
        elif how == "fail":
            self.worker.table.fail(job, InferenceFailed("no"))
        else:
            replan(job, deadline_ns=0)
            self.worker.table.expire()
            assert job.state != "open"

    @invariant()
    def the_queue_counts_what_has_not_begun(self) -> None:
        if not hasattr(self, "worker"):
            return
        waiting = [job for job in self.worker.jobs if job.state == "open" and not job.strategy_state.runs]
        assert self.worker.queue.admitted == sum(job.cost for job in waiting)

    @invariant()
    def nobody_is_far_ahead_of_a_client(self) -> None:
        for job in getattr(self, "worker", SimpleNamespace(jobs=[])).jobs:
            # A step adds one letter to each choice.
            assert job.strategy_state.flow.ahead <= WINDOW + job.work.call.n

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        self.worker.settle()
        self.worker.assert_nothing_is_left()
        received = self.worker.received
        for job in self.worker.jobs:
            call = job.work.call
            if received.ends.get(job.id) == "done":
                assert received.started[job.id] == len(call.ids)
                wanted = self.worker.made.greedy(call.ids, call.ending.max_tokens)
                assert {received.texts[job.id, k] for k in range(call.n)} == {wanted}
                assert {received.finished[job.id, k] for k in range(call.n)} == {"length"}
            elif job.state == "failed":
                assert job.id in received.ends


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(
    max_examples=12, stateful_step_count=25, deadline=None, derandomize=True
)


@both
def test_a_job_that_breaks_the_model_ends_alone_and_all_others_end_well() -> None:
    worker = Worker()
    worker.made.poison = {5}
    jobs = [worker.submit([first, 2, 3], 6) for first in (1, 5, 2)]
    worker.settle()
    assert [worker.received.ends[job.id] for job in jobs] == ["done", "INFERENCE_ERROR", "done"]
    assert worker.received.texts[1, 0] == worker.made.greedy([1, 2, 3], 6)
    worker.assert_nothing_is_left()


@pytest.mark.sample
@both
@pytest.mark.parametrize("place", ["begin", "step", "text"])
@pytest.mark.parametrize("name", LOGGED)
def test_whatever_is_raised_for_a_job_ends_that_job_alone(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NOTE: in the main thread of pytest, as nowhere in a worker, an interrupt would be the operator's.
    monkeypatch.setattr(foreign, "_may_interrupt", lambda: False)
    worker = Worker()
    engine = worker.made.engine
    plain, make = engine._forward, engine._make_output

    def forward(spans: Any) -> torch.Tensor:
        if place == "step" and any(span.sequence.tokens[0] == 5 for span in spans):
            raise EXCEPTIONS[name]()
        return plain(spans)

    def make_output(request: GenerationRequest, choice: int) -> Any:
        if place == "begin" and request.prompt[0] == 5:
            raise EXCEPTIONS[name]()
        output = make(request, choice)
        if place == "text" and request.prompt[0] == 5:
            output.push = lambda *_: obey(f"#throw {name} text", "text")  # type: ignore[method-assign]
        return output

    engine._forward, engine._make_output = forward, make_output  # type: ignore[method-assign]
    jobs = [worker.submit([first, 2, 3], 6) for first in (1, 5, 2)]
    worker.settle()
    assert [worker.received.ends[job.id] for job in jobs] == ["done", "INFERENCE_ERROR", "done"]
    for number, first in ((1, 1), (3, 2)):
        assert worker.received.texts[number, 0] == worker.made.greedy([first, 2, 3], 6)
    worker.assert_nothing_is_left()


class Loras(dict[str, Any]):
    """LoRA adapters by name, of which no step computes anything."""

    active = False

    def __bool__(self) -> bool:
        return False

    def get(self, name: str) -> Any:  # type: ignore[override]
        return self[name]


def test_the_word_that_a_prompt_is_tokenized_leaves_with_its_first_step_and_the_answer_with_its_last() -> (
    None
):
    worker = Worker()
    job = worker.submit([1, 2, 3], tokens=1)
    assert not worker.received.wakes, "nothing is worth a turn of the endpoint yet"
    worker.turn()
    assert worker.received.queued == {job.id: 3} and worker.received.ends == {job.id: "done"}
    assert worker.received.wakes == 1
    worker.settle()
    worker.assert_nothing_is_left()


@both
@pytest.mark.parametrize("changed", ["nothing", "model", "adapter", "unknown"])
def test_a_text_goes_on_with_the_weights_that_began_it_or_fails(changed: str) -> None:
    worker = Worker()
    loras = Loras(a=SimpleNamespace(serial=1, digest="first"))
    worker.adapter.identity, worker.made.engine.loras = "files", cast("Any", loras)
    before = worker.submit([1, 2, 3], 6, lora="a", written=Written(7))
    worker.settle()
    text, weights = worker.received.texts[before.id, 0], worker.received.weights[before.id]
    assert weights
    if changed == "model":
        worker.adapter.identity = "other files"
    elif changed == "adapter":
        loras["a"] = SimpleNamespace(serial=2, digest="second")
    elif changed == "unknown":
        worker.adapter.identity = weights = ""
    ids = worker.received.written[before.id][:8]
    after = worker.submit([1, 2, 3], 6, lora="a", written=Written(7, [ids], [False], weights))
    worker.settle()
    if changed == "nothing":
        assert worker.received.ends[after.id] == "done" and worker.received.texts[after.id, 0] == text[2:]
    else:
        assert worker.received.ends[after.id] == "NO_REPLICA" and (after.id, 0) not in worker.received.texts
    worker.assert_nothing_is_left()


@both
def test_memory_that_is_short_once_costs_nobody_the_answer() -> None:
    worker = Worker()
    jobs = [worker.submit([first, 2, 3], 6) for first in (1, 2)]
    worker.made.fails = 1
    worker.settle()
    assert [worker.received.ends[job.id] for job in jobs] == ["done", "done"]


@both
def test_steps_get_smaller_while_memory_is_short_and_grow_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock.of(bound, monkeypatch)
    worker = Worker()
    engine = worker.made.engine
    engine.prefill_tokens = configured = 256
    plain, most, failures = engine._forward, 100, 0

    def forward(spans: Any) -> torch.Tensor:
        nonlocal failures
        if sum(span.stop - span.start for span in spans) > most:
            failures += 1
            raise torch.OutOfMemoryError("out of memory, for this test")
        return plain(spans)

    engine._forward = forward  # type: ignore[method-assign]
    for wave, (wanted, tokens) in enumerate([(1, 128), (2, 64), (2, 64)]):
        jobs = [worker.submit([first, wave, *range(1, 49)], 6) for first in (1, 2, 3)]
        worker.settle()
        assert [worker.received.ends[job.id] for job in jobs] == ["done"] * 3
        assert (failures, engine.prefill_tokens) == (wanted, tokens)
    while engine.prefill_tokens < configured:
        clock.now += 21
        worker.submit([1, 2, 3], 1)
        worker.settle()
    assert worker.strategy._crowd(worker.adapter).budget is None


@both
def test_memory_that_is_always_short_ends_every_job_with_one_error() -> None:
    worker = Worker()
    jobs = [worker.submit([first, 2, 3], 6) for first in (1, 2)]
    worker.made.fails = 10**9
    worker.settle()
    assert [worker.received.ends[job.id] for job in jobs] == ["RESOURCE_EXHAUSTED"] * 2
    worker.assert_nothing_is_left()


@both
@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError("no room"), "RESOURCE_EXHAUSTED"), (ValueError("no pixels"), "INFERENCE_ERROR")],
)
def test_a_picture_that_cannot_be_seen_ends_its_job_alone_with_the_error_of_the_tower(
    error: Exception, code: str
) -> None:
    def turn(waiting: Iterable[Choice], prefill_tokens: int) -> None:
        if bad := [each for each in waiting if each.tokens[0] == 5]:
            raise Unseen(bad, error)

    worker = Worker()
    worker.made.engine.tower = cast(Any, SimpleNamespace(turn=turn, numbers=(0, 0, 0, 0, 0)))
    jobs = [worker.submit([first, 2, 3], 6) for first in (1, 5, 2)]
    worker.settle()
    assert [worker.received.ends[job.id] for job in jobs] == ["done", code, "done"]
    worker.assert_nothing_is_left()


@both
def test_scores_that_are_no_numbers_end_the_sequence_alone() -> None:
    worker = Worker()
    plain = worker.made.engine._forward

    def forward(spans: Any) -> torch.Tensor:
        logits = plain(spans).clone()
        choosing = [span for span in spans if span.chooses]
        for row, span in enumerate(choosing):
            if span.sequence.tokens[0] == 5:
                logits[row] = float("nan")
        return logits

    worker.made.engine._forward = forward  # type: ignore[method-assign]
    jobs = [worker.submit([first, 2, 3], 6) for first in (1, 5)]
    worker.settle()
    assert [worker.received.ends[job.id] for job in jobs] == ["done", "INFERENCE_ERROR"]
    worker.assert_nothing_is_left()


@both
def test_a_suspect_runs_alone_until_its_first_token_and_all_that_run_are_named() -> None:
    worker = Worker()
    for first in (1, 2):
        worker.submit([first, 2, 3], 20)
    worker.turn()
    worker.flights.clear()
    suspect = worker.submit([3, 2, 3], 20, solo=True)
    while not suspect.strategy_state.runs:
        worker.turn()
    named = [[number for _, number in flight] for flight in worker.flights]
    first = named.index([3])
    assert all(3 not in flight for flight in named[:first])
    assert 3 in worker.received.started
    worker.settle()
    assert set(worker.received.ends.values()) == {"done"}
    assert [1, 2] in named or [2, 1] in named


@both
def test_jobs_apart_share_no_step_and_end_as_all_others_do() -> None:
    worker = Worker()
    others = [worker.submit([first, 2, 3], 20) for first in (1, 2)]
    worker.turn()
    worker.flights.clear()
    apart = [worker.submit([first, 2, 3], 20, solo=True, apart=True) for first in (3, 4)]
    worker.settle()
    named = [{number for _, number in flight} for flight in worker.flights]
    assert all(len(flight) == 1 or not flight & {job.id for job in apart} for flight in named)
    alone = {apart[0].id}
    meanwhile = named[named.index(alone) : len(named) - named[::-1].index(alone)]
    assert any(flight & {job.id for job in others} for flight in meanwhile)
    for job, first in zip([*others, *apart], (1, 2, 3, 4), strict=True):
        assert worker.received.texts[job.id, 0] == worker.made.greedy([first, 2, 3], 20)
    worker.assert_nothing_is_left()


@both
def test_one_job_apart_runs_in_a_turn_so_that_many_leave_the_others_half_of_the_device() -> None:
    worker = Worker()
    worker.submit([1, 2, 3], 60)
    apart = [worker.submit([first, 2, 3], 60, solo=True, apart=True) for first in (2, 3)]
    while not all(job.strategy_state.runs for job in apart):
        worker.turn()
    named = set()
    worker.flights.clear()
    while worker.turn():
        alone = {number for flight in worker.flights for _, number in flight} & {job.id for job in apart}
        assert len(alone) <= 1
        named |= alone
        worker.flights.clear()
    assert named
    worker.settle()
    worker.assert_nothing_is_left()


@both
def test_a_job_apart_whose_client_does_not_read_holds_nobody_else() -> None:
    worker = Worker()
    slow = worker.submit([1, 2, 3], 60, solo=True, apart=True)
    quick = worker.submit([2, 2, 3], 60)
    while quick.state == "open":
        worker.turn()
        worker.read(quick)
    while worker.turn():
        pass
    assert slow.state == "open" and slow.strategy_state.paused
    worker.settle()
    assert worker.received.texts[slow.id, 0] == worker.made.greedy([1, 2, 3], 60)
    worker.assert_nothing_is_left()


@both
def test_a_suspect_stays_alone_when_its_first_step_fails_for_memory() -> None:
    worker = Worker()
    for first in (1, 2):
        worker.submit([first, 2, 3], 20)
    worker.turn()
    plain, failed = worker.made.engine._forward, []

    def forward(spans: Any) -> torch.Tensor:
        if any(span.sequence.tokens[0] == 3 for span in spans) and not failed:
            failed.append([span.sequence.request.key.id for span in spans])
            raise torch.OutOfMemoryError("out of memory, for this test")
        return plain(spans)

    worker.made.engine._forward = forward  # type: ignore[method-assign]
    suspect = worker.submit([3, 2, 3], 20, solo=True)
    worker.flights.clear()
    while not worker.made.engine.has_chosen(suspect):
        worker.turn()
    named = [[number for _, number in flight] for flight in worker.flights]
    alone = [flight for flight in named[named.index([3]) :] if 3 in flight]
    assert failed == [[3]] and alone[:2] == [[3], [3]], "the failed step, and the one after it"
    worker.settle()
    assert set(worker.received.ends.values()) == {"done"}
    worker.assert_nothing_is_left()


@both
def test_a_client_that_does_not_read_holds_nobody_else() -> None:
    worker = Worker()
    slow, quick = worker.submit([1, 2, 3], 60), worker.submit([2, 2, 3], 60)
    while quick.state == "open":
        worker.turn()
        worker.read(quick)
    assert slow.state == "open" and slow.strategy_state.paused
    assert WINDOW < slow.strategy_state.flow.ahead <= WINDOW + 1
    assert not worker.turn(), "the device rests while the client does"
    worker.settle()
    assert worker.received.texts[1, 0] == worker.made.greedy([1, 2, 3], 60)


@both
def test_log_probabilities_count_for_what_a_client_does_not_read() -> None:
    worker = Worker()
    slow = worker.submit([1, 2, 3], 60, logprobs=20)
    while worker.turn():
        pass
    told = len(worker.received.texts[1, 0])
    assert slow.strategy_state.paused and slow.strategy_state.flow.ahead > WINDOW and told == 1
    worker.settle()
    assert len(worker.received.texts[1, 0]) == 60


@both
def test_a_call_that_counts_only_never_reaches_the_device() -> None:
    worker = Worker()
    worker.submit([1, 2, 3], counts_only=True)
    assert worker.received.started == {1: 3} and worker.received.ends == {1: "done"}
    worker.assert_nothing_is_left()


def refused(worker: Worker, tokens: int) -> float:
    """Retry-After of a request behind as many as the worker takes, each of so many tokens."""
    for _ in range(RUNNING + WAITING):
        worker.submit([1, 2, 3], tokens)
    with pytest.raises(QueueFull) as caught:
        worker.submit([1, 2, 3], tokens)
    worker.settle()
    worker.assert_nothing_is_left()
    assert caught.value.retry_after_s is not None
    return float(caught.value.retry_after_s)


@both
def test_the_time_to_come_again_follows_what_waiting_requests_may_generate_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.STEP_S", 1.0)
    worker = Worker(blocks=200)
    worker.submit([1, 2, 3], 40)
    worker.settle()
    began = generation.time.monotonic()
    short = refused(worker, 2)
    took_s = generation.time.monotonic() - began
    assert short <= 2 * took_s, "a lone long answer says nothing of many short ones"
    began = generation.time.monotonic()
    long = refused(worker, 20)
    took_s = generation.time.monotonic() - began
    assert 2 * short < long <= 2 * took_s


@both
def test_the_time_to_come_again_follows_what_such_requests_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STEP_S", 1.0)
    worker = Worker(blocks=200)
    worker.submit([1, 2, 3], 12)
    worker.settle()
    first = refused(worker, 12)
    for _ in range(40):
        worker.strategy._crowd(worker.adapter).finished(2)
    assert 2 * refused(worker, 12) < first, "these may generate much, but such requests took little"


@both
def test_a_caller_with_less_than_its_part_gets_in_where_another_fills_the_room() -> None:
    worker = Worker()
    for _ in range(RUNNING + WAITING):
        worker.submit([1, 2, 3], 2, caller="greedy")
    with pytest.raises(QueueFull):
        worker.submit([1, 2, 3], 2, caller="greedy")
    worker.submit([1, 2, 3], 2, caller="modest")
    worker.settle()
    worker.assert_nothing_is_left()


@both
def test_a_full_waiting_room_says_when_to_come_again() -> None:
    worker = Worker()
    for _ in range(RUNNING + WAITING):
        worker.submit([1, 2, 3], 8)
    with pytest.raises(QueueFull, match=r"generation\.max_waiting 6") as caught:
        worker.submit([1, 2, 3], 8)
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
    worker.settle()
    worker.assert_nothing_is_left()
