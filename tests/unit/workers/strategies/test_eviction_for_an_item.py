"""When an idle model is unloaded for an item that does not fit, and when that is not tried again."""

from __future__ import annotations

import pytest

from tests.fakes.clock import Clock
from workers.strategies import one_shot


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the module."""
    return Clock.of(one_shot, monkeypatch)


def eviction(asked: list[str], answer: bool = True) -> one_shot.Eviction:
    """A relief that notes for whom it asked."""

    def unload_idle(model: str, wait_s: float) -> bool:
        asked.append(model)
        return answer

    return one_shot.Eviction(unload_idle)


def test_every_item_that_is_helped_may_be_helped_again(clock: Clock) -> None:
    asked: list[str] = []
    found = eviction(asked)
    assert found.make_room("a") and found.make_room("a")
    assert asked == ["a", "a"]


def test_after_an_eviction_in_vain_the_model_waits_and_others_do_not(clock: Clock) -> None:
    asked: list[str] = []
    found = eviction(asked)
    assert found.make_room("a")
    found.in_vain("a")
    assert not found.make_room("a") and not found.make_room("a")
    assert found.make_room("b")
    clock.now += one_shot.EVICT_AGAIN_AFTER_S
    assert found.make_room("a")
    assert asked == ["a", "b", "a"]


def test_nothing_to_unload_is_no_room(clock: Clock) -> None:
    assert not eviction([], answer=False).make_room("a")
