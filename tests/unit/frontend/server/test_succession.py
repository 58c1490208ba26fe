"""When a frontend that a reload replaces may stop listening."""

from __future__ import annotations

import asyncio
import os
import time

from frontend.server.drain import Succession


class Clock:
    """Whole instants, each later than the one before."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


def test_a_frontend_is_missed_from_the_reload_until_another_listens() -> None:
    succession = Succession(clock := Clock())
    succession.listens(0)
    since = clock.now
    assert not succession.is_missed(since), "a stop is no reload"
    succession.reloading()
    assert succession.is_missed(since)
    succession.listens(1)
    assert not succession.is_missed(since)


def test_a_frontend_of_after_the_reload_is_not_missed() -> None:
    succession = Succession(clock := Clock())
    succession.reloading()
    succession.listens(0)
    assert not succession.is_missed(clock.now)


def test_each_reload_waits_for_frontends_of_its_own() -> None:
    succession = Succession(clock := Clock())
    succession.listens(0)
    succession.reloading()
    succession.listens(1)
    since = clock.now
    succession.reloading()
    assert succession.is_missed(since)
    succession.listens(0)
    assert not succession.is_missed(since)


def test_more_frontends_than_places_share_them() -> None:
    succession = Succession(clock := Clock())
    succession.listens(3)
    since = clock.now
    succession.reloading()
    succession.listens(10_003)
    assert not succession.is_missed(since)


def test_the_wait_ends_with_a_successor_in_another_process_or_with_its_time() -> None:
    succession = Succession()
    succession.listens(0)
    since = time.monotonic_ns()
    succession.reloading()
    began = time.monotonic()
    asyncio.run(succession.replaced(since, 0.2))
    assert 0.2 <= time.monotonic() - began < 30
    child = os.fork()
    if child == 0:
        succession.listens(1)
        os._exit(0)
    os.waitpid(child, 0)
    began = time.monotonic()
    asyncio.run(succession.replaced(since, 60))
    assert time.monotonic() - began < 30
