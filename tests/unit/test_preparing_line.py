"""Whose items are prepared next: queries before bulk work, and bulk work all the same."""

from __future__ import annotations

import threading

from tests.unit.test_batcher import job
from workers.preparing_line import BULK_EVERY, PreparingLine


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


def test_jobs_of_a_lane_keep_their_order() -> None:
    line, jobs = PreparingLine(), [job([1]) for _ in range(3)]
    for one in jobs:
        line.put(one)
    assert [line.get() for _ in jobs] == jobs


def test_closing_the_line_ends_every_waiting_thread() -> None:
    line, left = PreparingLine(), job([1])
    line.put(left)
    assert line.get() is left
    waiting = [threading.Thread(target=line.get, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    line.close()
    for thread in waiting:
        thread.join(5)
    assert line.get() is None and not any(thread.is_alive() for thread in waiting)
