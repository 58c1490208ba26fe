"""Delays between the starts of a worker that keeps dying."""

from __future__ import annotations

import pytest

from workers.supervisor.slots import FAILURES, HEALTHY_S, MAX_DELAY_S, QUARANTINE_S, WINDOW_S, Backoff


def delays(lives_s: list[float], base_s: float = 1.0) -> list[float]:
    """Delay after each of these lives, one directly after the other."""
    backoff, now, found = Backoff(base_s), 0.0, []
    for lived_s in lives_s:
        now += lived_s
        found.append(backoff.failed(now, lived_s))
        now += found[-1]
    return found


def test_the_first_restart_is_immediate_then_delays_double_up_to_a_limit() -> None:
    assert delays([1.0] * 9) == [0, 1, 2, 4, 8, 16, 32, MAX_DELAY_S, MAX_DELAY_S]


def test_the_base_is_a_setting() -> None:
    assert delays([1.0] * 4, base_s=0.2) == pytest.approx([0, 0.2, 0.4, 0.8])


def test_a_healthy_life_forgets_earlier_failures() -> None:
    assert delays([1.0, 1.0, 1.0, HEALTHY_S, 1.0]) == [0, 1, 2, 0, 1]
    assert delays([1.0, 1.0, 1.0, HEALTHY_S - 1, 1.0]) == [0, 1, 2, 4, 8]


def test_a_slot_is_exhausted_by_failures_inside_the_window_only() -> None:
    backoff = Backoff()
    for n in range(FAILURES - 1):
        backoff.failed(float(n), 1.0)
        assert not backoff.exhausted(float(n))
    assert not backoff.exhausted(WINDOW_S)
    backoff.failed(5.0, 1.0)
    assert backoff.exhausted(5.0)
    assert not backoff.exhausted(5.0 + WINDOW_S)


def test_a_worker_that_is_killed_again_and_again_stays_away_for_minutes() -> None:
    """Sixteen kills in 80 s over two workers, each of a worker that runs at the time."""
    slots, back_at, quarantined = [Backoff(), Backoff()], [0.0, 0.0], 0
    for kill in range(16):
        now = kill * 5.0
        running = [at for at in (0, 1) if back_at[at] <= now]
        if not running:
            continue
        victim = running[kill % len(running)]
        delay = slots[victim].failed(now, 5.0)
        if slots[victim].exhausted(now) and len(running) == 2:
            quarantined, delay = quarantined + 1, QUARANTINE_S
        back_at[victim] = now + delay
    assert quarantined, "five ends in a minute, while the other worker serves"
    assert max(back_at) > 80 + WINDOW_S


def test_failures_that_are_far_apart_never_exhaust_a_slot() -> None:
    backoff = Backoff()
    for n in range(50):
        now = n * (WINDOW_S / 2)
        backoff.failed(now, 10.0)
        assert not backoff.exhausted(now)
