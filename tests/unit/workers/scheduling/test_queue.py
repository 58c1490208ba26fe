"""The worker's queue: what it counts and tells, and whom it wakes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.engine.local.outstanding import Outstanding
from ipc.errors import QueueFull
from ipc.settings import Queue, Settings
from ipc.wire.messages import InferCall, Submit, Work
from tests.fakes.jobs import make_job
from tests.unit.workers.scheduling.test_batcher import job
from workers.adapters.base import Gathering, Prepared
from workers.scheduling.job import Batch, Job, Piece
from workers.scheduling.queue import WorkQueue


def work_queue(**settings: float) -> WorkQueue:
    """A queue with these settings of its bound."""
    return WorkQueue(Settings(queue=Queue(**settings)))  # type: ignore[arg-type]


def ran(waiting: WorkQueue, tokens: int, seconds: float, model: str = "m", *, full: bool = True) -> None:
    """The device has run a batch."""
    pieces = [Piece(make_job(model=model), 0, Prepared(None, tokens))]
    waiting.ran(Batch(pieces, None, tokens, 0.0, full, seconds=seconds), tokens)


@given(st.lists(st.integers(1, 500), max_size=40))
def test_what_is_admitted_and_settled_adds_up(costs: list[int]) -> None:
    waiting, held = work_queue(min_tokens=600), list[Job]()
    for cost in costs:
        one = make_job(cost=cost)
        try:
            waiting.admit(one)
        except QueueFull:
            assert sum(each.cost for each in held) >= 600
            waiting.settle(held.pop(0))
            continue
        held.append(one)
        assert waiting.admitted == sum(each.cost for each in held) < 600 + max(each.cost for each in held)
    for one in held:
        waiting.settle(one)
    assert waiting.admitted == 0


def test_a_faster_device_gets_a_longer_queue_in_tokens_and_the_bound_follows_it_down() -> None:
    waiting = work_queue(max_wait_s=2.0)
    assert waiting.limit == 2048, "one full batch, before anything has run"
    for _ in range(20):
        ran(waiting, 2048, 0.04096)
    assert waiting.limit == pytest.approx(100_000, rel=0.01)
    waiting.admit(make_job(cost=50_000))
    assert waiting.limit == pytest.approx(100_000, rel=0.01)
    for _ in range(20):
        ran(waiting, 2048, 0.4096)
    assert waiting.limit == pytest.approx(10_000, rel=0.02)


def test_sessions_are_told_their_rooms_the_waits_and_the_prices() -> None:
    waiting = work_queue(max_wait_s=2.0, bulk_max_wait_s=10.0)
    ran(waiting, 2048, 1.024)
    waiting.admit(make_job(cost=500, session=b"a"))
    waiting.admit(make_job(cost=3000, session=b"b", lane="bulk"))
    told = waiting.credits([b"a", b"b"], step_s=3)
    for key, others_s in ((b"a", 1.5), (b"b", 0.25)):
        credits = told[key]
        assert (credits.room_s, credits.bulk_room_s) == pytest.approx((1.75, 8.5))
        assert (credits.wait_s, credits.bulk_wait_s) == pytest.approx((0.25, 1.75))
        assert credits.others_s == pytest.approx(others_s) and credits.step_s == 3
        assert credits.prices == pytest.approx({"m": 0.0005}) and credits.floor == 1024


def test_a_caller_below_its_part_has_credit_while_the_first_batch_of_a_flooded_model_runs() -> None:
    waiting, frontend = work_queue(max_wait_s=2.0, min_tokens=1000), Outstanding()
    for number in range(17):
        request = Submit(number, Work("m", InferCall([], []), 2**62, 60, "req", caller="flood"))
        frontend.begin(request)
        waiting.admit(make_job(cost=60, caller="flood", session=b"a"))
    frontend.credit(waiting.credits([b"a"])[b"a"])
    assert not frontend.allows(Work("m", InferCall([], []), 2**62, 60, "req", caller="flood"))
    assert frontend.allows(Work("m", InferCall([], []), 2**62, 60, "req", caller="quiet"))


def test_items_of_a_job_that_has_ended_are_not_queued() -> None:
    waiting, ended = work_queue(), job([5, 5])
    ended.state = "cancelled"
    waiting.put(ended, 0, 2)
    assert waiting.take(100, 10) == []


def test_removing_a_job_takes_its_waiting_items_out() -> None:
    waiting, one, other = work_queue(), job([5, 5, 5]), job([5])
    waiting.put(one, 0, 3)
    waiting.put(other, 0, 1)
    assert [piece.job for piece in waiting.take(5, 10)] == [one]
    assert waiting.remove(one) == 2
    assert [piece.job for piece in waiting.take(100, 10)] == [other]


class Waiter:
    """A thread that notes each answer of `wait`."""

    def __init__(self, wait: Callable[[], bool]) -> None:
        self.answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._wait = wait
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        going = True
        while going:
            going = self._wait()
            self.answers.put(going)

    def has_ended(self) -> bool:
        """Whether the last answer was False."""
        self._thread.join(60)
        return not self._thread.is_alive()


def test_the_device_thread_wakes_for_work_for_a_nudge_and_at_the_end() -> None:
    waiting, called = work_queue(), threading.Event()

    def other() -> bool:
        return called.is_set()

    def wait() -> bool:
        going = waiting.wait_work(other)
        called.clear()
        waiting.take(100, 10)
        return going

    device = Waiter(wait)
    waiting.put(job([5]), 0, 1)
    assert device.answers.get(timeout=60) is True
    called.set()
    waiting.nudge()
    assert device.answers.get(timeout=60) is True
    waiting.close()
    assert device.has_ended()


def test_the_forming_thread_wakes_only_for_a_backlog_while_it_is_wanted() -> None:
    waiting = work_queue()
    former = Waiter(lambda: waiting.wait_backlog(lambda: 20, lambda: True) and bool(waiting.take(1000, 10)))
    waiting.put(job([5, 5]), 0, 2)
    with pytest.raises(queue.Empty):
        former.answers.get(timeout=0.05)
    waiting.put(job([10]), 0, 1)
    assert former.answers.get(timeout=60) is True
    waiting.close()
    assert former.has_ended()


def test_a_backlog_that_waited_for_a_busy_device_is_formed_when_it_becomes_busy() -> None:
    waiting, busy = work_queue(), threading.Event()
    former = Waiter(lambda: waiting.wait_backlog(lambda: 20, busy.is_set) and bool(waiting.take(1000, 10)))
    waiting.put(job([10, 10]), 0, 2)
    with pytest.raises(queue.Empty):
        former.answers.get(timeout=0.05)
    busy.set()
    waiting.device_busy()
    assert former.answers.get(timeout=60) is True
    waiting.close()
    assert former.has_ended()


def test_the_snapshot_tells_items_tokens_and_age_per_model_and_lane() -> None:
    waiting, one = work_queue(), job([5, 6], lane="bulk")
    one.queued_ns = 0
    waiting.put(one, 0, 2)
    [(model, lane, items, tokens, age_s)] = waiting.snapshot()
    assert (model, lane, items, tokens) == ("model", "bulk", 2, 11)
    assert 0 <= age_s < 5


def test_the_device_thread_sleeps_until_what_gathers_is_due() -> None:
    waiting, taken = work_queue(), queue.Queue[int]()
    patient, now = job([16]), time.monotonic_ns()
    patient.queued_ns, patient.adapter.gathering = now, Gathering(200_000_000, 64)
    looks = 0

    def other() -> bool:
        nonlocal looks
        looks += 1
        return False

    def wait() -> None:
        waiting.wait_work(other)
        taken.put(len(waiting.take(100, 10)))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.put(patient, 0, 1)
    assert taken.get(timeout=60) == 1, "it woke before anything was due"
    thread.join()
    assert time.monotonic_ns() - now >= 200_000_000
    assert looks <= 4, "it does not look all the time"


def test_the_thread_that_forms_ahead_is_not_woken_for_what_gathers() -> None:
    waiting = work_queue()
    patient = job([100])
    patient.queued_ns, patient.adapter.gathering = time.monotonic_ns(), Gathering(60_000_000_000, 1000)
    woken = queue.Queue[bool]()
    thread = threading.Thread(target=lambda: woken.put(waiting.wait_backlog(lambda: 50, lambda: True)))
    thread.start()
    waiting.put(patient, 0, 1)
    waiting.device_busy()
    with pytest.raises(queue.Empty):
        woken.get(timeout=0.2)
    waiting.put(job([60], group="other"), 0, 1)
    assert woken.get(timeout=60) is True
    thread.join()
