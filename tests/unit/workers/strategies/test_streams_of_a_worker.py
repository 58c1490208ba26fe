"""Streams inside a worker: turns, rests, and the end by whoever ends them; nothing of them is left, in any order."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ipc.catalog.model_config import ModelConfig, TensorConfig
from ipc.errors import InferenceFailed
from ipc.memory.arena import BLOCKS_OFFSET, Arena, Block, LeaseTable
from ipc.metrics.registry import WorkerMetrics
from ipc.settings import Arena as ArenaSettings
from ipc.settings import Settings, Worker
from ipc.wire.messages import InferCall, TensorInput, TensorOutput
from ipc.wire.streams import Part
from tests.fakes.jobs import make_job, replan
from tests.fakes.program import FakeProgram
from workers.adapters.shared.named_tensors import NamedBatch
from workers.device.stepping import Activity
from workers.endpoint.endpoint import Endpoint
from workers.inputs import Payload
from workers.operations.infer import Infer
from workers.scheduling.context import Context
from workers.scheduling.job import Batch, Job, collate
from workers.scheduling.queue import Reason
from workers.strategies.stream import Streams

CONFIG = ModelConfig(
    name="parts",
    inputs=(TensorConfig(name="INPUT0", datatype="INT32", dims=(1,)),),
    outputs=(TensorConfig(name="OUTPUT0", datatype="INT32", dims=(-1,)),),
    decoupled=True,
)
ARENA_NBYTES = 64 << 10
LIMIT_S = 60.0
SETTINGS = Settings(arena=ArenaSettings(inline_bytes=1024), worker=Worker(hang_timeout_s=LIMIT_S))


class Counting(FakeProgram):
    """The fake program, which counts the generators that are open."""

    def __init__(self) -> None:
        super().__init__(CONFIG, "parts")
        self.open = 0

    def stream(self, batch: NamedBatch) -> Iterator[Any]:
        self.open += 1
        try:
            yield from super().stream(batch)
        finally:
            self.open -= 1


class Sent:
    """An endpoint whose one frontend takes everything, and leases what comes in blocks."""

    def __init__(self, leases: LeaseTable) -> None:
        self.leases = leases
        self.parts: dict[int, list[tuple[int, Block | None]]] = {}
        self.ends: dict[int, str] = {}
        self.unread_ids: list[int] = []

    def post(self, work: Any, wake: bool = True) -> None:
        work()

    def part(self, key: bytes, part: Part, block: Block | None, inline: bytes | None) -> None:
        assert part.result.id not in self.ends, "a part after the end"
        data = bytes(self.leases.data(block)) if block is not None else inline or b""
        if block is not None:
            self.leases.lease(block, key)
        values = np.frombuffer(data, np.int32)
        assert (values == values[0]).all()
        self.parts.setdefault(part.result.id, []).append((int(values[0]), block))

    def reply(self, key: bytes, result: Any, block: Block | None, inline: bytes | None) -> None:
        assert result.id not in self.ends
        self.ends[result.id] = "done"

    def fail(self, key: bytes, request: int, error: Any) -> None:
        assert request not in self.ends
        self.ends[request] = error.code

    def unread(self, key: bytes, request: int) -> None:
        self.unread_ids.append(request)


class StreamMachine(RuleBasedStateMachine):
    """A device, frontends that take parts, and somebody who ends requests, in any order."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.arena = Arena(Path(self.directory.name) / "arena", BLOCKS_OFFSET + ARENA_NBYTES, "e" * 16)
        self.leases = LeaseTable(self.arena)
        self.sent = Sent(self.leases)
        self.adapter = Counting()
        arena: Any = SimpleNamespace(record_flight=self.note_flight)
        context = Context.make(SETTINGS, WorkerMetrics("worker-0"), arena, cast("Endpoint", self.sent), 2048)
        self.queue, self.table, self.line = context.queue, context.jobs, context.line
        self.activity, self.streams = context.activity, Streams(context)
        self.flights: list[list[tuple[int, int]]] = []
        self.jobs: list[Job] = []
        self.taken: dict[int, int] = {}

    def note_flight(self, flight: list[tuple[int, int]]) -> None:
        """What the arena would say after a death."""
        self.flights.append(flight)

    @rule(
        count=st.integers(0, 15),
        width=st.sampled_from([1, 3000]),
        window=st.integers(1, 9),
        pauses=st.booleans(),
    )
    def arrive(self, count: int, width: int, window: int, pauses: bool = False) -> None:
        number = len(self.jobs) + 1
        call = InferCall(
            [TensorInput("INPUT0", "INT32", [1], 0, 4)],
            [TensorOutput("OUTPUT0")],
            parameters={"width": width, **({"pause_s": 1e6} if pauses else {})},
        )
        payload = Payload(memoryview(np.int32(count).tobytes()))
        job = make_job(
            call,
            number=number,
            model="parts",
            deadline_ns=time.monotonic_ns() + 10**12,
            of=self.adapter,
            strategy=self.streams,
            parts=window,
        )
        job.payload, job.group = payload, "parts"
        self.streams.check(job.work)
        self.streams.admit(job)
        job.prepared = Infer().prepare(self.adapter, call, 0, 1, payload)
        job.output = cast("Any", SimpleNamespace(block=None, buffer=b"", arrays={}))
        self.queue.admit(job)
        self.table.enter(job)
        self.queue.put(job, 0, 1)
        self.jobs.append(job)
        self.taken[number] = 0

    @rule()
    def run_a_turn(self) -> None:
        """What the device thread does with one batch."""
        self.go_on()
        pieces = self.table.claim_pieces(self.queue.take(1 << 20, 64, lambda model: 1 << 20))
        if not pieces:
            return
        [piece] = pieces
        batch = Batch(pieces, collate(pieces), piece.prepared.cost, 0.0)
        piece.job.first_run_ns = piece.job.first_run_ns or time.monotonic_ns()
        self.streams.run(batch)
        self.table.unclaim_pieces(pieces)
        self.streams.after(batch)

    @rule(which=st.integers(0, 50), count=st.integers(1, 9))
    def take(self, which: int, count: int) -> None:
        """A frontend takes parts, and gives their blocks back."""
        if not self.jobs:
            return
        job = self.jobs[which % len(self.jobs)]
        parts = self.sent.parts.get(job.id, [])
        took = parts[self.taken[job.id] : self.taken[job.id] + count]
        for _, block in took:
            if block is not None:
                self.leases.release(b"s", block.offset, block.generation)
        self.taken[job.id] += len(took)
        if took and job.state == "open":
            self.streams.taken(job, len(took))

    @rule()
    def let_pauses_end(self) -> None:
        for job in self.line.jobs(Reason.PAUSE):
            self.line.add(job, Reason.PAUSE, 1)
        for job in self.jobs:
            job.strategy_state.pause_until_ns = min(job.strategy_state.pause_until_ns, 1)
        self.go_on()
        assert self.line.next_ns() is None

    def go_on(self) -> None:
        """What the device thread does between two batches."""
        for job in self.line.take_paused(time.monotonic_ns()):
            job.strategy.resume(job)
        for strategy in self.queue.take_asking():
            strategy.go_on()

    @rule()
    def tick(self) -> None:
        self.table.expire()
        self.streams.wake_roomless()

    @rule(which=st.integers(0, 50), how=st.sampled_from(["cancel", "fail", "expire"]))
    def end(self, which: int, how: str) -> None:
        if not self.jobs:
            return
        job = self.jobs[which % len(self.jobs)]
        if how == "cancel":
            self.table.cancel(job)
        elif how == "fail":
            self.table.fail(job, InferenceFailed("no"))
        else:
            replan(job, deadline_ns=0)
            self.table.expire()
            assert job.state != "open", "a late stream goes on"

    @invariant()
    def parts_are_in_order_and_not_too_far_ahead(self) -> None:
        for job in getattr(self, "jobs", []):
            parts = self.sent.parts.get(job.id, [])
            assert [number for number, _ in parts] == list(range(len(parts)))
            if job.state == "open":
                assert job.strategy_state.flow.ahead == len(parts) - self.taken[job.id]

    @invariant()
    def a_stream_that_rests_fills_no_lane(self) -> None:
        if hasattr(self, "jobs"):
            going = [job for job in self.jobs if job.state == "open"]
            resting = [job for job in going if job.resting]
            assert self.table.resting.total() == len(resting)
            assert self.queue.admitted == 16 * (len(going) - len(resting))

    @invariant()
    def the_arena_is_whole(self) -> None:
        if hasattr(self, "leases"):
            self.leases.verify()

    def teardown(self) -> None:
        """Everybody takes everything: all streams come to their end, and nothing of them is left."""
        if not hasattr(self, "jobs"):
            return
        for _ in range(4000):
            if all(job.state != "open" for job in self.jobs):
                break
            self.run_a_turn()
            for which in range(len(self.jobs)):
                self.take(which, 50)
            self.tick()
            self.let_pauses_end()
        assert all(job.state != "open" for job in self.jobs), "a stream rests for ever"
        self.go_on()
        for which in range(len(self.jobs)):
            self.take(which, 50)
        assert all(len(named) == 1 for named in self.flights[::2]) and not any(self.flights[1::2])
        assert self.adapter.open == 0 and not self.queue.interrupted and not len(self.table)
        assert self.queue.admitted == 0 and self.table.resting.total() == 0
        assert all(job.claims == 0 for job in self.jobs)
        assert self.leases.used_nbytes == 0
        for job in self.jobs:
            if job.state == "done":
                count = int(np.frombuffer(bytes(job.payload._data), np.int32)[0])
                assert len(self.sent.parts.get(job.id, [])) == count
                assert self.sent.ends[job.id] == "done"
        self.arena.close()
        self.directory.cleanup()


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = hypothesis_settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_others_go_on_while_a_stream_pauses() -> None:
    machine = StreamMachine()
    machine.begin()
    machine.arrive(2, 1, 8, pauses=True)
    machine.arrive(3, 1, 8)
    waiting, other = machine.jobs
    for _ in range(20):
        machine.run_a_turn()
    assert other.state == "done" and len(machine.sent.parts[other.id]) == 3
    assert waiting.state == "open" and waiting.id not in machine.sent.parts
    until = machine.line.next_ns()
    assert until is not None and until - time.monotonic_ns() > 9e14
    machine.go_on()
    assert machine.queue.admitted == 0 and machine.table.resting.total() == 1, "its time has not come"
    for _ in range(6):
        machine.let_pauses_end()
        machine.run_a_turn()
    assert waiting.state == "done" and len(machine.sent.parts[waiting.id]) == 2
    machine.teardown()


class Watched(Activity):
    """Notes what was allowed to each thing that began."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[float] = []

    def begin(self, limit_s: float) -> None:
        self.limits.append(limit_s)
        super().begin(limit_s)


def test_the_watchdog_s_limit_is_that_of_one_step() -> None:
    machine = StreamMachine()
    machine.begin()
    machine.streams._activity = watched = Watched()
    machine.arrive(count=3, width=1, window=9)
    while machine.jobs[0].state == "open":
        machine.run_a_turn()
    # One beginning for what makes the steps, one for each part, and one for the step that finds no more.
    assert watched.limits == [LIMIT_S] * 5
    machine.teardown()
