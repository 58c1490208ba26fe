"""A batch that made way for other work: what becomes of it when it is cancelled, late, or raises, and of the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ipc.errors import PenstockError
from ipc.settings import Settings
from ipc.wire.messages import EncodeCall, InputItem
from tests.fakes.adapter import FakeAdapter
from tests.fakes.jobs import make_job
from tests.fakes.pipeline import Placed, placing
from workers.adapters.base import Prepared
from workers.device import stepping
from workers.scheduling.job import Job

STEPS = 4
COST = 16
NBYTES = 4096


class Stepping(FakeAdapter):
    """Notes each step of its batches in `ran`. `during` is called within a step, by the number of the step."""

    def __init__(self, name: str, ran: list[tuple[str, int]]) -> None:
        super().__init__({}, 512)
        self.name, self.ran = name, ran
        self.during: dict[int, Any] = {}

    def collate(self, prepared: Any) -> Any:
        return [item.payload for item in prepared]

    def encode(self, batch: Any, outputs: frozenset[str]) -> Any:
        for number in stepping.each(range(STEPS), [COST] * STEPS):
            self.ran.append((self.name, number))
            self.during.get(number, lambda: None)()
        return {"dense": torch.zeros(len(batch), 4)}


class Device:
    """The device thread by hand, with two models. A query of `b` arrives in the first step of `a`."""

    def __init__(
        self, pipeline: Placed, told: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.pipeline, self.told = pipeline, told
        self.jobs: list[Job] = []
        self.ran: list[tuple[str, int]] = []
        self.flights: list[list[int]] = []
        self.models = {name: Stepping(name, self.ran) for name in "ab"}
        self.models["a"].during[0] = lambda: self.submit("b", 2)
        monkeypatch.setattr(
            pipeline.context.arena,
            "record_flight",
            lambda flight: self.flights.append([number for _, number in flight]),
        )
        self.long = self.submit("a", 1)

    def submit(self, name: str, number: int) -> Job:
        """One more request."""
        call, pipeline = EncodeCall([InputItem("text")], ["dense"]), self.pipeline
        job = make_job(
            call, number=number, model=name, of=self.models[name], strategy=pipeline.kinds.one_shot, cost=COST
        )
        job.prepared, job.group = [Prepared("text", COST)], name
        pipeline.queue.admit(job)
        pipeline.jobs.enter(job)
        pipeline.queue.put(job, 0, 1)
        self.jobs.append(job)
        return job

    @property
    def states(self) -> list[str]:
        """What has become of the requests of `a` and `b`."""
        return [job.state for job in self.jobs]

    def turn(self) -> bool:
        """One turn of the device; whether there was anything to run."""
        executor = self.pipeline.executor
        batch = executor.next.take()
        if batch is not None:
            with torch.inference_mode():
                executor.run_turn(batch)
        return batch is not None


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """After the first turn, in which the batch of `a` was suspended. In the end nothing is left anywhere."""
    told: list[tuple[int, str]] = []

    def fail(key: bytes, number: int, error: PenstockError) -> None:
        told.append((number, error.code))

    calls: dict[str, Any] = {
        "post": lambda work: work(),
        "fail": fail,
    }
    with placing(tmp_path, Settings(), 1 << 20, **calls) as pipeline:
        found = Device(pipeline, told, monkeypatch)
        assert found.turn()
        assert found.ran == [("a", 0)] and pipeline.queue.suspended and not pipeline.executor.idle
        yield found
        while found.turn():
            pass
        assert pipeline.idle and not pipeline.queue.suspended
        assert pipeline.queue.admitted == 0 and not pipeline.leases.used_nbytes
        assert found.flights[-1] == [] and found.long.claims == 0


def test_two_batches_take_turns_and_each_is_named_as_in_flight_only_while_it_runs(device: Device) -> None:
    while device.turn():
        pass
    assert sorted(device.ran) == [(name, step) for name in "ab" for step in range(STEPS)]
    assert device.states == ["done", "done"]
    assert {*map(tuple, device.flights)} == {(), (1,), (2,)} and not any(device.flights[1::2])


def test_a_suspended_batch_whose_client_leaves_ends_at_once_and_keeps_its_memory_until_then(
    device: Device,
) -> None:
    jobs, job = device.pipeline.jobs, device.long
    jobs.attach(job, jobs.reserve(NBYTES))
    device.pipeline.cancel(job.session, job.id)
    assert device.pipeline.leases.used_nbytes, "the device may still write there"
    assert device.turn() and device.ran == [("a", 0)], "it computed for nobody"
    assert not device.pipeline.queue.suspended and not device.pipeline.leases.used_nbytes
    while device.turn():
        pass
    assert device.states == ["cancelled", "done"] and not device.told
    assert device.ran[1:] == [("b", step) for step in range(STEPS)]


def test_a_suspended_batch_that_is_late_computes_no_further_step(device: Device) -> None:
    device.long.work = msgspec.structs.replace(device.long.work, deadline_ns=1)
    while device.turn():
        pass
    assert device.states == ["failed", "done"] and device.told == [(1, "DEADLINE_EXCEEDED")]
    assert [step for name, step in device.ran if name == "a"] == [0]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_batch_that_raises_after_it_was_suspended_fails_alone(name: str, device: Device) -> None:
    def fail() -> None:
        raise RuntimeError("a bug in the middle")

    device.models[name].during[2] = fail
    while device.turn():
        pass
    other = "b" if name == "a" else "a"
    assert device.told == [(1 if name == "a" else 2, "INFERENCE_ERROR")]
    assert device.states == (["failed", "done"] if name == "a" else ["done", "failed"])
    assert [step for ran, step in device.ran if ran == other] == list(range(STEPS))
    assert [step for ran, step in device.ran if ran == name] == [0, 1, 2]


def test_what_runs_beside_a_suspended_batch_has_steps_of_its_own(device: Device) -> None:
    """A batch asks its own steps who still waits, and not those of the batch that runs or is suspended beside it."""
    device.long.work = msgspec.structs.replace(device.long.work, deadline_ns=1)
    seen: list[tuple[bool, bool]] = []
    queue = device.pipeline.queue
    device.models["b"].during[0] = lambda: seen.append((queue.suspended, stepping.current().deserted))
    while device.turn():
        pass
    assert seen == [(True, False)]
    assert not stepping.current().deserted, "outside of batches there are no steps"
