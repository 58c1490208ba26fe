"""The times of one generated text, with a clock that is moved by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ipc.wire.messages import TextTiming
from workers.generation import request
from workers.generation.request import Phases


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_ns = 1000

    def monotonic_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(request, "time", SimpleNamespace(monotonic_ns=found.monotonic_ns))
    return found


def test_each_moment_belongs_to_one_phase(clock: Clock) -> None:
    phases = Phases(decode_ns=7)
    phases.arrived()
    clock.now_ns += 10  # waits for its turn
    phases.asks()
    phases.asks()
    clock.now_ns += 30  # its picture is seen
    phases.sees()
    phases.sees()
    clock.now_ns += 5  # waits for a step
    assert phases.waited_ns == 0
    phases.stepped()
    assert phases.waited_ns == 15
    clock.now_ns += 100  # the first chunk of the prompt
    phases.stepped()
    phases.asks()
    clock.now_ns += 20  # the picture is seen again, since the text was preempted
    phases.sees()
    clock.now_ns += 50
    phases.wrote()
    clock.now_ns += 400
    phases.wrote()
    assert phases.waited_ns == 15
    assert phases.timing(clock.now_ns) == TextTiming(decode_ns=7, see_ns=50, prefill_ns=150, write_ns=400)


def test_a_text_without_a_token_has_no_times(clock: Clock) -> None:
    phases = Phases()
    phases.arrived()
    phases.stepped()
    clock.now_ns += 10
    assert phases.timing(clock.now_ns) is None
