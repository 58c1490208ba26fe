"""The bound of the worker's queue and its drain rate."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import QueueFull
from ipc.settings import Queue, Settings
from tests.unit.test_batcher import job
from workers.queue import DrainRate, WorkQueue


def work_queue(min_tokens: int = 100, max_wait_s: float = 2.0) -> WorkQueue:
    """A queue with this bound."""
    return WorkQueue(Settings(queue=Queue(min_tokens=min_tokens, max_wait_s=max_wait_s)))


def test_one_request_may_overshoot_the_bound_and_the_next_is_refused() -> None:
    queue = work_queue(min_tokens=100)
    queue.admit(99)
    queue.admit(5000)
    with pytest.raises(QueueFull) as refused:
        queue.admit(1)
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
    queue.settle(5000)
    queue.admit(1)
    assert queue.admitted == 100


def test_retry_after_is_the_time_that_the_device_needs_for_what_waits() -> None:
    queue = work_queue(min_tokens=100, max_wait_s=0.001)
    queue.rate.record(10_000, 10.0)
    queue.admit(7_500)
    with pytest.raises(QueueFull) as refused:
        queue.admit(1)
    assert refused.value.retry_after_s == 8


def test_a_fast_device_gets_a_longer_queue() -> None:
    queue = work_queue(min_tokens=100, max_wait_s=2.0)
    assert queue.limit == 100
    queue.rate.record(50_000, 1.0)
    assert queue.limit == 100_000


@given(st.lists(st.integers(1, 500), max_size=40))
def test_what_is_admitted_and_settled_adds_up(costs: list[int]) -> None:
    queue = work_queue(min_tokens=600)
    held = []
    for cost in costs:
        try:
            queue.admit(cost)
        except QueueFull:
            assert sum(held) >= 600
            queue.settle(held.pop(0))
            continue
        held.append(cost)
        assert queue.admitted == sum(held) < 600 + max(held)
    for cost in held:
        queue.settle(cost)
    assert queue.admitted == 0


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
    queue, ended = work_queue(), job([5, 5])
    ended.state = "cancelled"
    queue.put(ended, 0, 2)
    assert queue.take(100, 10) == []


def test_removing_a_job_takes_its_waiting_items_out() -> None:
    queue, one, other = work_queue(), job([5, 5, 5]), job([5])
    queue.put(one, 0, 3)
    queue.put(other, 0, 1)
    assert [piece.job for piece in queue.take(5, 10)] == [one]
    assert queue.remove(one) == 2
    assert [piece.job for piece in queue.take(100, 10)] == [other]


def test_waiters_wake_for_work_and_at_the_end() -> None:
    queue = work_queue()
    answers: list[bool] = []
    waiter = threading.Thread(
        target=lambda: answers.extend([queue.wait(bool), queue.wait(lambda tokens: False)])
    )
    waiter.start()
    queue.put(job([5]), 0, 1)
    queue.close()
    waiter.join(5)
    assert answers in ([True, False], [False, False])
    assert not waiter.is_alive()


def test_the_snapshot_tells_items_tokens_and_age_per_model_and_lane() -> None:
    queue, one = work_queue(), job([5, 6], lane="bulk")
    one.queued_ns = 0
    queue.put(one, 0, 2)
    [(model, lane, items, tokens, age_s)] = queue.snapshot()
    assert (model, lane, items, tokens) == ("model", "bulk", 2, 11)
    assert 0 <= age_s < 5
