"""Jobs that generate text: the sequences of one model share the steps of its engine.

1. A turn takes new jobs into the engine and runs steps for `TURN_S`, or until other work waits. Then one open job, the
   carrier, waits in the queue for all of them. The queue counts a job until its first turn only.
2. After each step a session gets one message, `Deltas`, with what is new for all of its streams. A stream with more
   than `WINDOW_NBYTES` that its client has not taken pauses.
3. The flight record names every request that runs. A job that runs alone (`Job.solo`) runs alone until its first token,
   and a job that was on several dead workers (`Job.apart`) to its end. A turn has steps of all other jobs, then of one
   job that runs alone: so the other jobs keep half of the device, however many jobs run alone.
4. After a step that fails each sequence takes a step alone, and a request whose sequence fails ends with an error.
   When memory ran out, steps also get fewer tokens of prompts for some minutes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ipc.errors import NoReplica, QueueFull
from ipc.shares import Shares
from ipc.wire.messages import GenerateCall
from ipc.wire.streams import QUEUED, STARTED, WINDOW_NBYTES, Flow, Start, nbytes_of
from workers.adapters.base import Adapter
from workers.device import oom
from workers.device.stepping import batch_limit_s
from workers.generation.request import Emission, GenerationRequest, deltas_of
from workers.generation.scheduler import Unfit, Unseen
from workers.scheduling.bound import TokenBudget
from workers.scheduling.context import Context
from workers.scheduling.job import Batch, Job, Piece, Strategy, error_of, item_error

if TYPE_CHECKING:
    from workers.generation.engine import Engine
    from workers.generation.scheduler import Sequence as Choice

log = logging.getLogger(__name__)

TURN_S = 0.01
"""Seconds of steps in one turn, if no other work waits before. A step is never interrupted."""


FIRST_TOKENS = 256
"""Expected tokens of a choice without a bound, before any choice of its model has ended."""
LATEST_WEIGHT = 0.1
"""The weight of one step in the mean time of steps, and of one choice in the mean length of choices."""


@dataclass(slots=True, eq=False)
class TextState:
    """What a job keeps besides: `owed` are the tokens that its choices are expected to generate.

    `flow` counts bytes; more than `WINDOW_NBYTES` ahead pause a stream. The endpoint's thread calls `Flow.taken`. The
    device thread writes all else: `paused` while the client has too much to read, `runs` once in the engine. `choices`
    are there for a text that an earlier worker has begun, from its arrival until it runs.
    """

    owed: float
    flow: Flow = field(default_factory=lambda: Flow(WINDOW_NBYTES + 1))
    paused: bool = False
    runs: bool = False
    choices: list[Choice] | None = None


@dataclass(slots=True, eq=False)
class Crowd:
    """The jobs of one engine. `sequences` are those of all open jobs, in `shares` by caller.

    `carrier` is the job that waits for its turn. `step_s` is the time of a step lately, `length` the mean tokens of the
    choices that ended lately (0: none has), `owed` the tokens that open jobs are expected to generate, `prompts` those
    of their prompts. `budget` are the tokens of prompts in a step since memory ran out, until it has grown back to what
    is configured.
    """

    jobs: dict[Job, None] = field(default_factory=dict)
    sequences: int = 0
    shares: Shares = field(default_factory=Shares)
    carrier: Job | None = None
    step_s: float = 0.0
    length: float = 0.0
    owed: float = 0.0
    prompts: int = 0
    budget: TokenBudget | None = None

    def expected(self, call: GenerateCall) -> float:
        """Tokens that a call will generate: as many as choices took lately, and at most as many as the call allows."""
        at_most = call.ending.max_tokens
        each = self.length or (FIRST_TOKENS if at_most is None else at_most)
        return call.n * (each if at_most is None else min(each, at_most))

    def stepped(self, seconds: float) -> None:
        """Note the time of a step."""
        self.step_s = _latest(self.step_s, seconds)

    def finished(self, tokens: int) -> None:
        """Note the tokens of a choice that has ended."""
        self.length = _latest(self.length, tokens)

    def seconds_for(self, waiting: int, engine: Engine) -> float:
        """Predicted time until the engine has done as much as `waiting` of the sequences take."""
        steps = self.owed / engine.max_sequences + self.prompts / engine.prefill_tokens
        return self.step_s * steps * waiting / self.sequences


class Generations(Strategy):
    """All generated text of one worker."""

    ends_late = in_turns = bounds_itself = True

    def __init__(self, context: Context) -> None:
        self._table, self._queue, self._activity = context.jobs, context.queue, context.activity
        self._record_flight = context.arena.record_flight
        # NOTE: the first step of a model takes long on some devices, and nothing is known of its pace before.
        self._step_limit_s = batch_limit_s(context.settings.worker.hang_timeout_s, 0.0)
        self._most_waiting = context.settings.generation.max_waiting
        self._crowds: WeakKeyDictionary[Adapter, Crowd] = WeakKeyDictionary()
        self._changed: deque[Job] = deque()
        """Jobs that have ended, or whose clients read again, for the next `go_on`."""

    def admit(self, job: Job) -> None:
        """Refuse a job when too many sequences of its model wait, unless its caller has less than its part of them.

        A text that an earlier worker has begun is never refused: the client has its beginning.
        """
        crowd, number, engine = self._crowd(job.adapter), _call_of(job).n, job.adapter.engine
        work = job.work
        assert engine is not None
        with self._table.lock:
            most = engine.max_sequences + self._most_waiting - number + 1
            is_begun = job.written is not None and job.written.has_begun
            if (
                crowd.sequences
                and not is_begun
                and not crowd.shares.allows(most, _one, "", work.caller, work.share)
            ):
                waiting = max(1, crowd.sequences - engine.max_sequences)
                raise QueueFull(
                    f"{waiting} sequences of model '{job.model}' wait (generation.max_waiting {self._most_waiting})",
                    retry_after_s=max(1, math.ceil(crowd.seconds_for(waiting, engine))),
                )
            crowd.sequences += number
            crowd.shares.begin(number, "", work.caller, work.share)
            job.strategy_state = TextState(crowd.expected(_call_of(job)))
            crowd.owed += job.strategy_state.owed
            crowd.prompts += work.cost

    def group(self, job: Job) -> Hashable:
        """All jobs of an engine take their turns together."""
        return None

    def is_batch(self, batch: Batch) -> bool:
        """The engine counts tokens and sequences itself."""
        return False

    def arrive(self, job: Job) -> bool:
        """Tell the tokens of a prompt. A job that only counts them is answered; all others wait for the device.

        What an earlier worker has written is replayed here, mostly in a preparing thread. A text goes on with the
        weights that began the text, or fails.
        """
        if job.strategy_state.runs:
            return True
        request: GenerationRequest = job.prepared[0].payload
        request.written = job.written
        weights = _weights_of(job)
        if request.is_carried_on:
            if not weights or request.written is None or request.written.weights != weights:
                self._table.fail(job, NoReplica("the model or its LoRA adapter is another one by now"))
                return False
            job.strategy_state.choices = job.adapter.engine.choices_of(request)
        counts_only = _call_of(job).counts_only
        kind = STARTED if counts_only else QUEUED
        start = Start(job.prepared[0].cost, weights="" if counts_only else weights)
        # PERF: the word leaves with the output of the next step, which mostly is the first of this job, or at the next
        # tick. A message of its own would cost worker and frontend a turn of their loops for each request.
        deltas = deltas_of([job.id], [Emission(job, 0, kind, start=start)])
        self._table.send_deltas(job.session, deltas)
        if counts_only:
            self._table.complete(job, 1, [])
        return not counts_only

    def run(self, batch: Batch) -> int:
        """Take the jobs of a batch into the engine, and run steps for a while; returns how many tokens ran."""
        adapter: Adapter = batch.first.adapter
        engine, crowd = adapter.engine, self._crowd(adapter)
        assert engine is not None
        if crowd.carrier is not None and any(piece.job is crowd.carrier for piece in batch.pieces):
            crowd.carrier = None
        before, began = engine.computed_tokens, time.monotonic()
        self._queue.device_busy()
        new = [piece.job for piece in batch.pieces if not piece.job.strategy_state.runs]
        for job in new:
            self._begin(engine, crowd, job)
        if new and new[0].solo:
            first, new[0].solo = new[0], False
            self._alone(engine, crowd, first, lambda: engine.has_chosen(first))
        apart = [job for job in crowd.jobs if job.apart]
        for job in apart:
            engine.pause(job)
        until = began + TURN_S
        # PERF: the jobs of a turn are the same to its end, which follows the first that has ended.
        together = [job for job in crowd.jobs if not job.apart]
        self._record(together)
        while engine.has_work:
            self._step(engine, crowd, together)
            # NOTE: another job of this engine waits in the queue too, and joins with the next turn.
            if time.monotonic() >= until or self._changed or self._queue.has_work:
                break
        for job in apart:
            if not job.strategy_state.paused:
                engine.resume(job)
        alone = next((job for job in apart if not job.strategy_state.paused), None)
        if alone is not None:
            # NOTE: one such job a turn, or many of them would leave the others little of the device.
            crowd.jobs[alone] = crowd.jobs.pop(alone)
            self._alone(engine, crowd, alone, _passed(time.monotonic() + TURN_S))
        return engine.computed_tokens - before

    def _begin(self, engine: Engine, crowd: Crowd, job: Job) -> None:
        """A job enters the engine; from now on the queue does not count it."""
        request: GenerationRequest = job.prepared[0].payload
        request.key = job
        with self._table.lock:
            if job.state != "open":
                return
            self._table.rest(job)
            job.strategy_state.runs = True
            crowd.jobs[job] = None
        choices, job.strategy_state.choices = job.strategy_state.choices, None
        try:
            engine.add(request, choices)
        except BaseException as raised:
            self._end_with(engine, {job}, error_of(raised))

    def _alone(self, engine: Engine, crowd: Crowd, job: Job, is_over: Callable[[], bool]) -> None:
        """Run a job without any other until `is_over`."""
        others = [other for other in crowd.jobs if other is not job and not other.strategy_state.paused]
        for other in others:
            engine.pause(other)
        self._record([job])
        while engine.has_work and job.state == "open" and not is_over():
            self._step(engine, crowd, [job], ahead=False)
        for other in reversed(others):
            engine.resume(other)

    def _step(self, engine: Engine, crowd: Crowd, jobs: list[Job], ahead: bool = True) -> None:
        """One step of the engine for `jobs`, whose output is sent; recover from a failure.

        The flight record names the jobs before and after. Without `ahead` nothing of these is under way behind the
        step.
        """
        self._activity.begin(self._step_limit_s)
        began = time.monotonic()
        try:
            emissions = engine.step(ahead)
        except Unfit as unfit:
            self._end_with(engine, {sequence.request.key for sequence in unfit.sequences}, unfit)
        except BaseException as raised:
            error = error_of(raised)
            oom.forget_frames(error)
            log.warning("a step of %d sequences failed (%s)", crowd.sequences, type(error).__name__)
            if oom.is_out_of_memory(error):
                self._shrink(engine, crowd)
            oom.release_cached()
            self._isolated(engine, crowd, [job for job in jobs if not job.strategy_state.paused])
            self._record(jobs)
        else:
            if crowd.budget is not None:
                self._grow(engine, crowd)
            self._tell(engine, crowd, emissions)
            crowd.stepped(time.monotonic() - began)

    def _record(self, jobs: list[Job]) -> None:
        """Name in the flight record the jobs that the next steps compute."""
        self._record_flight([(job.tag, job.id) for job in jobs])

    @staticmethod
    def _shrink(engine: Engine, crowd: Crowd) -> None:
        """After memory ran out, give steps fewer tokens of prompts for a while."""
        crowd.budget = crowd.budget or TokenBudget(engine.prefill_tokens)
        crowd.budget.shrink(engine.prefill_tokens)
        engine.prefill_tokens = crowd.budget.tokens

    @staticmethod
    def _grow(engine: Engine, crowd: Crowd) -> None:
        """After a step that fitted into memory, raise the budget of tokens of prompts again."""
        assert crowd.budget is not None
        crowd.budget.grow()
        engine.prefill_tokens = crowd.budget.tokens
        if crowd.budget.tokens >= crowd.budget.configured:
            crowd.budget = None

    def _isolated(self, engine: Engine, crowd: Crowd, jobs: list[Job]) -> None:
        """Give each job a step of its own; a job whose own step fails ends."""
        for job in jobs:
            engine.pause(job)
        for job in jobs:
            engine.resume(job)
            self._record([job])
            self._activity.begin(self._step_limit_s)
            try:
                emissions = engine.step(ahead=False)
            except BaseException as raised:
                error = error_of(raised)
                oom.forget_frames(error)
                self._end_with(engine, {job}, error)
                oom.release_cached()
            else:
                self._tell(engine, crowd, emissions)
            engine.pause(job)
        for job in reversed(jobs):
            if not job.strategy_state.paused:
                engine.resume(job)

    def _end_with(self, engine: Engine, jobs: Iterable[Hashable], error: Exception) -> None:
        """End jobs with the error that the model raised on them."""
        if isinstance(error, Unseen):
            error = error_of(error.error)
        for job in jobs:
            assert isinstance(job, Job)
            engine.cancel(job)
            self._table.complete(job, 1, [item_error(Piece(job, 0, job.prepared[0]), error)])

    def _tell(self, engine: Engine, crowd: Crowd, emissions: list[Emission]) -> None:
        """Send the output of a step, pause streams whose clients do not read, and complete jobs that have ended."""
        by_session: dict[bytes, tuple[list[int], list[Emission]]] = {}
        ends: list[Emission] = []
        full: dict[Job, None] = {}
        for emission in emissions:
            job = emission.key
            assert isinstance(job, Job)
            if job.session not in by_session:
                by_session[job.session] = [], []
            ids, entries = by_session[job.session]
            ids.append(job.id)
            entries.append(emission)
            if emission.text or emission.prompt:
                flow: Flow = job.strategy_state.flow
                flow.sent(nbytes_of(emission.text, emission.logprobs or emission.prompt))
                if not flow.open:
                    full[job] = None
            if emission.finish is not None:
                ends.append(emission)
        for session, (ids, entries) in by_session.items():
            self._table.send_deltas(session, deltas_of(ids, entries))
        alive = engine.keys
        for emission in ends:
            assert emission.finish is not None
            crowd.finished(emission.finish.tokens)
            if emission.key not in alive:
                self._finish(emission.key)
        for job in full:
            if job in alive:
                job.strategy_state.paused = True
                engine.pause(job)
                # NOTE: the client may have taken text before the mark was set.
                if job.strategy_state.flow.half_open:
                    self._note_change(job)
        # PERF: once for all deltas and answers of the step, so that they leave in one message for each session.
        self._table.wake_endpoint()

    def _finish(self, job: Hashable) -> None:
        """Complete a job whose choices have all ended."""
        assert isinstance(job, Job)
        if job.state != "open":
            return
        now = time.monotonic_ns()
        job.device_ns = now - job.first_run_ns
        job.text = job.prepared[0].payload.phases.timing(now)
        self._table.complete(job, 1, [], wake=False)

    def after(self, batch: Batch) -> None:
        """Put one of the open jobs into the queue for the next turn."""
        self._carry(batch.first.adapter)

    def _carry(self, adapter: Adapter) -> None:
        """Put an open job into the queue, as the carrier, while the engine has work and no job carries its turn."""
        crowd, engine = self._crowd(adapter), adapter.engine
        if crowd.carrier is not None and crowd.carrier.state == "open":
            return
        crowd.carrier = None
        if engine is not None and engine.has_work:
            crowd.carrier = next((job for job in crowd.jobs if job.state == "open"), None)
            if crowd.carrier is not None:
                self._queue.put_again(crowd.carrier)

    def taken(self, job: Job, nbytes: int) -> None:
        """Note the text that the client of a stream has taken. Endpoint thread only."""
        state: TextState = job.strategy_state
        state.flow.taken(nbytes)
        if state.paused and state.flow.half_open:
            self._note_change(job)

    def ended(self, job: Job) -> None:
        """Have the engine drop the job before its next step."""
        if job.strategy_state is None:
            return
        crowd = self._crowd(job.adapter)
        with self._table.lock:
            crowd.sequences -= _call_of(job).n
            crowd.prompts -= job.work.cost
            crowd.shares.end(_call_of(job).n, "", job.work.caller)
            crowd.owed = crowd.owed - job.strategy_state.owed if crowd.sequences else 0.0
        self._note_change(job)

    def _note_change(self, job: Job) -> None:
        """Note that a job has ended or can go on, and have the device thread tell the engine. Any thread."""
        self._changed.append(job)
        self._queue.ask(self)

    def go_on(self) -> None:
        """Take ended jobs out of their engines, and go on with those whose clients read again."""
        while self._changed:
            job = self._changed.popleft()
            engine = job.adapter.engine
            if job.state != "open":
                self._crowd(job.adapter).jobs.pop(job, None)
                engine.cancel(job)
            elif job.strategy_state.paused:
                job.strategy_state.paused = False
                engine.resume(job)
            self._carry(job.adapter)

    def _crowd(self, adapter: Adapter) -> Crowd:
        crowd = self._crowds.get(adapter)
        if crowd is None:
            crowd = self._crowds[adapter] = Crowd()
        return crowd


def _call_of(job: Job) -> GenerateCall:
    call = job.work.call
    assert isinstance(call, GenerateCall)
    return call


def _weights_of(job: Job) -> str:
    """Stands for the model and the LoRA adapter of a job; empty for files that changed while the model was loaded."""
    adapter: Adapter = job.adapter
    identity, lora, engine = adapter.identity, _call_of(job).lora, adapter.engine
    if not (identity and lora):
        return identity
    assert engine is not None and engine.loras is not None
    return f"{identity} {engine.loras.get(lora).digest}"


def _latest(mean: float, value: float) -> float:
    """The mean of late values with one more; 0: there is none yet."""
    return mean + (value - mean) * (LATEST_WEIGHT if mean else 1.0)


def _one(model: str) -> float:
    """The price of a sequence among the shares of callers: each counts as one."""
    return 1.0


def _passed(moment: float) -> Callable[[], bool]:
    return lambda: time.monotonic() >= moment
