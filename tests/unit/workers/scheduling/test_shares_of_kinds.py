"""Text, pure work and sequences of several callers share one device: by the time that each model uses.

The device is a loop that moves the clock by the time of each turn. Text takes its turns by a ticket, as
`workers.strategies.generation` does: one of its jobs stands in the queue again after each turn, whatever its prompt
costs. A sequence has one request in the queue, and its next request comes when that one is answered.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from ipc.settings import Settings
from tests.fakes.clock import Clock
from tests.fakes.jobs import adapter, make_job
from workers.adapters.base import Prepared
from workers.scheduling import queue as queue_module
from workers.scheduling.batcher import UNKNOWN_PACE
from workers.scheduling.job import Job
from workers.scheduling.queue import WorkQueue

SHARES = {"three": 3.0, "one": 1.0}
PURE, TEXT, STEPS = "pure", "text", "steps"
TURN_S = {TEXT: 0.020, STEPS: 0.005}
PURE_TOKENS_PER_S = 8_000.0
SECONDS = 60.0
_ids = count(1)


class Device:
    """A queue with work of the chosen kinds, and the seconds that each model has had of the device."""

    def __init__(self, kinds: set[str], clock: Clock) -> None:
        self.queue, self._clock = WorkQueue(Settings()), clock
        self.seconds: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        """Of the pure model, by caller."""
        self._adapters = {kind: adapter() for kind in kinds}
        if PURE in kinds:
            for caller in SHARES:
                for _ in range(8):
                    self._put(PURE, 64, caller)
        for kind, cost in ((TEXT, 4_000), (STEPS, 1)):
            if kind in kinds:
                self._put(kind, cost, "one")

    def _put(self, kind: str, cost: int, caller: str) -> None:
        job = make_job(
            model=kind,
            cost=cost,
            number=next(_ids),
            of=self._adapters[kind],
            caller=caller,
            share=SHARES[caller],
        )
        job.prepared, job.group = [Prepared(None, cost)], kind
        self.queue.put(job, 0, 1)

    def run(self, seconds: float) -> None:
        """Turns until the device has been busy for so long."""
        while self.seconds.total() < seconds:
            pieces = self.queue.take(512, 64)
            self._turn([piece.job for piece in pieces])

    def _turn(self, jobs: list[Job]) -> None:
        kind, tokens = jobs[0].model, sum(job.cost for job in jobs)
        took_s = TURN_S.get(kind, tokens / PURE_TOKENS_PER_S)
        self._clock.now += took_s
        self.seconds[kind] += took_s
        self.queue.settle_time(jobs[0], took_s - tokens / UNKNOWN_PACE)
        if kind == TEXT:
            self.queue.put_again(jobs[0])
            return
        for job in jobs:
            if kind == PURE:
                self.tokens[job.work.caller] += job.cost
            self._put(kind, job.cost, job.work.caller)


@pytest.mark.parametrize("kinds", [{PURE, TEXT}, {TEXT, STEPS}, {PURE, STEPS}, {PURE, TEXT, STEPS}])
def test_models_of_all_kinds_have_equal_time_and_callers_theirs_by_weight(
    kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(kinds, Clock.of(queue_module, monkeypatch))
    device.run(SECONDS)
    parts = {kind: seconds / device.seconds.total() for kind, seconds in device.seconds.items()}
    assert parts == pytest.approx(dict.fromkeys(kinds, 1 / len(kinds)), abs=0.01)
    if PURE in kinds:
        assert device.tokens["three"] / device.tokens["one"] == pytest.approx(3.0, rel=0.05)
