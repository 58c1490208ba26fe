"""The bound of the worker's queue and its drain rate."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import QueueFull
from ipc.settings import Queue, Settings
from ipc.wire.messages import EncodeCall, Work
from tests.unit.test_batcher import job
from workers.adapters.base import Gathering
from workers.scheduling.queue import DrainRate, WorkQueue


def work(cost: int, lane: str = "interactive", caller: str = "", share: float = 1.0) -> Work:
    """A request that costs so many tokens."""
    return Work("m", EncodeCall([], []), 1 << 62, cost, "req", lane=lane, caller=caller, share=share)


def work_queue(min_tokens: int = 100, max_wait_s: float = 2.0) -> WorkQueue:
    """A queue with this bound."""
    return WorkQueue(Settings(queue=Queue(min_tokens=min_tokens, max_wait_s=max_wait_s)))


def test_one_request_may_overshoot_the_bound_and_the_next_is_refused() -> None:
    waiting = work_queue(min_tokens=100)
    waiting.admit(work(99))
    waiting.admit(work(5000))
    with pytest.raises(QueueFull) as refused:
        waiting.admit(work(1))
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
    waiting.settle(5000)
    waiting.admit(work(1))
    assert waiting.admitted == 100


def test_retry_after_is_the_time_that_the_device_needs_for_what_waits() -> None:
    waiting = work_queue(min_tokens=100, max_wait_s=0.001)
    waiting.rate.record(10_000, 10.0)
    waiting.admit(work(7_500))
    with pytest.raises(QueueFull) as refused:
        waiting.admit(work(1))
    assert refused.value.retry_after_s == 8


def test_a_fast_device_gets_a_longer_queue() -> None:
    waiting = work_queue(min_tokens=100, max_wait_s=2.0)
    assert waiting.limit == 100
    waiting.rate.record(50_000, 1.0)
    assert waiting.limit == 100_000


@given(st.lists(st.integers(1, 500), max_size=40))
def test_what_is_admitted_and_settled_adds_up(costs: list[int]) -> None:
    waiting = work_queue(min_tokens=600)
    held = []
    for cost in costs:
        try:
            waiting.admit(work(cost))
        except QueueFull:
            assert sum(held) >= 600
            waiting.settle(held.pop(0))
            continue
        held.append(cost)
        assert waiting.admitted == sum(held) < 600 + max(held)
    for cost in held:
        waiting.settle(cost)
    assert waiting.admitted == 0


def test_the_drain_rate_follows_the_device_and_ignores_empty_batches() -> None:
    rate = DrainRate()
    assert rate.seconds_for(1000) == 0.0
    rate.record(1000, 1.0)
    assert rate.tokens_per_s == 1000
    rate.record(0, 0.0)
    assert rate.tokens_per_s == 1000
    for _ in range(50):
        rate.record(30_000, 10.0)
    assert 2900 < rate.tokens_per_s <= 3000
    assert rate.seconds_for(6000) == pytest.approx(2.0, rel=0.05)


def test_a_lone_query_moves_the_rate_less_than_a_full_batch() -> None:
    small, large = DrainRate(), DrainRate()
    for rate, tokens in ((small, 10), (large, 10_000)):
        rate.record(1000, 1.0)
        rate.record(tokens, tokens / 100)
    assert small.tokens_per_s > large.tokens_per_s


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


def test_a_full_bulk_lane_keeps_no_query_out() -> None:
    waiting = work_queue(min_tokens=100)
    waiting.admit(work(10_000, "bulk"))
    with pytest.raises(QueueFull):
        waiting.admit(work(1, "bulk"))
    waiting.admit(work(99, "interactive"))
    waiting.settle(10_000, "bulk")
    waiting.admit(work(1, "bulk"))
    assert waiting.admitted == 100


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
