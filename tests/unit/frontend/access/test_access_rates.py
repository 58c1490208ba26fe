"""Rates: the burst, the pace after it, and one clock for all frontends."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.access.gate import ROWS, RateMeter
from ipc.errors import RateLimited

SECOND_NS = 1_000_000_000


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns


def let_in(meter: RateMeter, rate: float, burst: int, key: int = 0) -> bool:
    """Whether one request gets in."""
    try:
        meter.spend(key, rate, burst)
    except RateLimited as error:
        assert error.retry_after_s is not None and error.retry_after_s >= 1
        return False
    return True


@given(st.floats(0.01, 10_000), st.integers(1, 200))
def test_after_a_rest_exactly_a_burst_gets_in_at_once(rate: float, burst: int) -> None:
    meter = RateMeter(1, Clock())
    assert sum(let_in(meter, rate, burst) for _ in range(burst + 5)) == burst


@given(st.lists(st.floats(0, 3), max_size=60), st.floats(0.1, 20), st.integers(1, 20))
def test_no_span_of_time_lets_in_more_than_its_rate_and_one_burst(
    gaps_s: list[float], rate: float, burst: int
) -> None:
    clock = Clock()
    meter, began, count = RateMeter(1, clock), clock.now_ns, 0
    for gap_s in gaps_s:
        clock.now_ns += int(gap_s * SECOND_NS)
        count += let_in(meter, rate, burst)
        assert count <= burst + rate * (clock.now_ns - began) / SECOND_NS + 1e-6


def test_a_steady_caller_below_the_rate_is_never_refused() -> None:
    clock = Clock()
    meter = RateMeter(1, clock)
    for _ in range(1000):
        assert let_in(meter, 3, 1)
        clock.now_ns += SECOND_NS // 3 + 1


def test_retry_after_is_the_time_until_the_next_request_gets_in() -> None:
    clock = Clock()
    meter = RateMeter(1, clock)
    assert let_in(meter, 0.1, 1)
    clock.now_ns += 3 * SECOND_NS
    with pytest.raises(RateLimited) as caught:
        meter.spend(0, 0.1, 1)
    assert caught.value.retry_after_s == 7
    clock.now_ns += 7 * SECOND_NS
    assert let_in(meter, 0.1, 1)


def test_keys_do_not_share_a_clock() -> None:
    meter = RateMeter(2, Clock())
    assert let_in(meter, 1, 1, key=0)
    assert not let_in(meter, 1, 1, key=0)
    assert let_in(meter, 1, 1, key=1)


def test_a_new_frontend_in_any_slot_goes_on_with_what_others_have_spent() -> None:
    meter = RateMeter(1, Clock())
    for slot in (0, 1, ROWS - 1, ROWS, 3 * ROWS + 5):
        meter.use_row(slot)
        assert let_in(meter, 1, 5)
    assert not let_in(meter, 1, 5)


def test_forked_processes_draw_on_one_burst() -> None:
    meter, burst = RateMeter(1), 40
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def frontend(slot: int) -> None:
        meter.use_row(slot)
        queue.put(sum(let_in(meter, 0.001, burst) for _ in range(burst)))
        os._exit(0)

    processes = [context.Process(target=frontend, args=(slot,)) for slot in range(3)]
    for process in processes:
        process.start()
    counts = [queue.get() for _ in processes]
    for process in processes:
        process.join(60)
    assert burst <= sum(counts) <= burst + 5, counts
