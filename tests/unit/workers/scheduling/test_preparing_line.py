"""Whose items are prepared next: queries before bulk work, and bulk work all the same."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.unit.workers.scheduling.test_batcher import job
from workers.scheduling.preparing import BULK_EVERY, PreparingLine


def test_queries_are_prepared_before_bulk_work_that_came_earlier() -> None:
    line, bulk, query = PreparingLine(), job([1], lane="bulk"), job([1])
    line.put(bulk)
    line.put(query)
    assert [line.get(), line.get()] == [query, bulk]


def test_bulk_work_gets_its_turn_while_queries_never_end() -> None:
    line, bulk = PreparingLine(), job([1], lane="bulk")
    line.put(bulk)
    turns = 0
    while True:
        line.put(job([1]))
        line.put(job([1]))
        turns += 1
        if line.get() is bulk:
            break
        assert turns < BULK_EVERY
    assert turns == BULK_EVERY


@pytest.mark.parametrize(
    ("quick", "bulk", "longest"),
    [
        ([True, False], False, BULK_EVERY + 1),
        ([False, True], False, BULK_EVERY + 1),
        ([False] + [True] * 7, True, 4 * BULK_EVERY),
        ([True] * 7 + [False], True, 4 * BULK_EVERY),
    ],
)
def test_a_long_text_gets_its_turn_on_several_threads(quick: list[bool], bulk: bool, longest: int) -> None:
    """`quick` says in turn which thread asks; a busy one asks less often."""
    line, long = PreparingLine(), job([1])
    line.put(long, is_long=True)
    for turn in range(longest):
        line.put(job([1]))
        if bulk:
            line.put(job([1], lane="bulk"))
        if line.get(quick=quick[turn % len(quick)]) is long:
            return
    pytest.fail("queries alone were served")


def test_bulk_work_has_no_more_than_its_turns_on_several_threads() -> None:
    line, taken = PreparingLine(), []
    for _ in range(10 * BULK_EVERY):
        line.put(job([1]))
        line.put(job([1], lane="bulk"))
    for turn in range(5 * BULK_EVERY):
        taken.append(line.get(quick=turn % 2 == 0))
    assert sum(one is not None and one.work.lane == "bulk" for one in taken) == 5


def test_jobs_of_a_lane_keep_their_order() -> None:
    line, jobs = PreparingLine(), [job([1]) for _ in range(3)]
    for one in jobs:
        line.put(one)
    assert [line.get() for _ in jobs] == jobs


def test_a_thread_for_short_texts_takes_no_long_ones() -> None:
    line, long, bulk, query = PreparingLine(), job([1]), job([1], lane="bulk"), job([1])
    line.put(long, is_long=True)
    line.put(bulk)
    line.put(query)
    assert [line.get(quick=True), line.get(quick=True)] == [query, bulk]
    waiting: list[object] = []
    thread = threading.Thread(target=lambda: waiting.append(line.get(quick=True)), daemon=True)
    thread.start()
    line.put(second := job([1]))
    thread.join(60)
    assert waiting == [second], "the long one was left where it is"
    assert line.get() is long


def test_long_texts_and_bulk_work_take_turns_behind_queries() -> None:
    line, query = PreparingLine(), job([1])
    long, bulk = [job([1]) for _ in range(3)], [job([1], lane="bulk") for _ in range(3)]
    for one, other in zip(long, bulk, strict=True):
        line.put(one, is_long=True)
        line.put(other)
    line.put(query)
    taken = [line.get() for _ in range(7)]
    assert taken[0] is query
    assert [one in long for one in taken[1:]] in ([True, False] * 3, [False, True] * 3)


def test_a_long_text_that_comes_after_a_turn_of_bulk_work_overtakes_no_query() -> None:
    line, bulk, query, long = PreparingLine(), job([1], lane="bulk"), job([1]), job([1])
    line.put(bulk)
    assert line.get() is bulk
    line.put(query)
    line.put(long, is_long=True)
    assert [line.get(), line.get()] == [query, long]


def test_a_long_text_wakes_a_thread_that_takes_it_whoever_else_waits() -> None:
    line, long, taken = PreparingLine(), job([1]), threading.Event()

    def take() -> None:
        if line.get() is long:
            taken.set()

    for quick in (True, True, False):
        target = take if not quick else partial(line.get, quick=True)
        threading.Thread(target=target, daemon=True).start()
    line.put(long, is_long=True)
    assert taken.wait(60)
    line.close()


def test_closing_the_line_ends_every_waiting_thread() -> None:
    line, left = PreparingLine(), job([1])
    line.put(left)
    assert line.get() is left
    waiting = [threading.Thread(target=line.get, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    line.close()
    for thread in waiting:
        thread.join(60)
    assert line.get() is None and not any(thread.is_alive() for thread in waiting)
