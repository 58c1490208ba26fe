"""A frontend's asking for models that are on their way out, and explicit loads that somebody gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ipc import demand
from ipc.demand import Demand
from ipc.errors import ModelNotLoaded
from ipc.messages import ModelStatus

MODEL = "org/m"


class Asked:
    """A channel to a worker whose states a test sets; remembers what it was asked."""

    def __init__(self, state: str, attempts: int = 1) -> None:
        self.slot, self.state, self.responsive, self.free_bytes, self.cost = 0, "ready", True, 100, 0
        self.credits = SimpleNamespace(rate=1.0, queued=0)
        self.models: dict[str, ModelStatus] = {}
        self.loads: list[bool] = []
        self.now(state, attempts)

    def now(self, state: str, attempts: int) -> None:
        """The worker tells another state."""
        self.models = {MODEL: ModelStatus(MODEL, state, attempts=attempts)}

    def load(self, model: str, explicit: bool = False) -> bool:
        """Remember it."""
        self.loads.append(explicit)
        return True

    def cost_of(self, model: str) -> int:
        """Nothing is in flight."""
        return 0


def explicit_load(channel: Asked, steps: list[tuple[str, int]]) -> str:
    """The outcome of a load by hand while the worker tells these states and attempts, one after the other."""

    async def until(done: Callable[[], bool]) -> None:
        for state, attempts in steps:
            if done():
                return
            channel.now(state, attempts)
        assert done(), "it waits for ever"

    channels: Any = [channel]
    return asyncio.run(Demand(lambda: channels, True).load(MODEL, True, until))


def test_a_request_asks_the_worker_that_unloads_the_model_to_load_it_again() -> None:
    channel = Asked("unloading")
    channels: Any = [channel]
    Demand(lambda: channels, True).want(MODEL)
    assert channel.loads == [False]


def test_a_load_by_hand_outlasts_the_unloading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "ASK_EVERY_S", 0.0)
    channel = Asked("unloading")
    assert explicit_load(channel, [("available", 1), ("loading", 2), ("loaded", 2)]) == "loaded"
    assert channel.loads[:2] == [True, True], "asked again once the model is available"


def test_a_load_by_hand_that_somebody_gives_up_is_answered_at_once() -> None:
    for steps in ([("loading", 2), ("available", 2)], [("available", 2)]):
        with pytest.raises(ModelNotLoaded, match="given up"):
            explicit_load(Asked("available"), steps)
    with pytest.raises(ModelNotLoaded, match="given up"):
        explicit_load(Asked("loading"), [("available", 1)])
