"""How long a worker is silent, by the clock of a frontend that may stand still itself."""

from __future__ import annotations

import pytest

from frontend.engine.local import dealer
from frontend.engine.local.dealer import SILENCE_S, Silence
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the module."""
    return Clock.of(dealer, monkeypatch)


def after(watched: Silence, clock: Clock, seconds: float, step_s: float = 0.1) -> bool:
    """Whether it is silent for long when it was looked at every `step_s` for so many seconds."""
    for _ in range(round(seconds / step_s)):
        clock.now += step_s
        watched.look()
    return watched.is_long


def test_it_is_long_after_two_seconds_without_an_answer(clock: Clock) -> None:
    watched = Silence()
    assert not after(watched, clock, SILENCE_S - 0.2)
    assert after(watched, clock, 0.4)
    assert watched.heard_at == 1000.0
    watched.end()
    assert not watched.is_long and not after(watched, clock, SILENCE_S - 0.2)


def test_what_this_process_slept_through_is_not_counted(clock: Clock) -> None:
    watched = Silence()
    after(watched, clock, 1.0)
    clock.now += 3600
    assert not after(watched, clock, 0.1), "the answer of meanwhile is there, and not read yet"
    watched.end()
    clock.now += 3600
    watched.end()
    assert not after(watched, clock, SILENCE_S - 0.4)
    assert after(watched, clock, 0.6)
