"""A frontend's asking for models that are on their way out, and explicit loads that somebody gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.engine.interface import always
from frontend.engine.local import demand
from frontend.engine.local.demand import Demand
from ipc.errors import ModelLoadFailed, ModelNotFound, ModelNotLoaded
from ipc.wire.messages import ModelStatus

MODEL = "org/m"
LATER = 1 << 62
Until = Callable[[Callable[[], bool]], Awaitable[None]]


async def never(done: Callable[[], bool]) -> None:
    """Nothing waits here."""
    raise AssertionError("it waits")


def among(channels: Sequence[Asked], until: Until = never) -> Any:
    """Workers with these channels, for whose changes `until` waits."""

    async def wait(done: Callable[[], bool], deadline_ns: int) -> None:
        assert deadline_ns == LATER
        await until(done)

    return SimpleNamespace(channels=channels, wait=wait)


class Asked:
    """A channel to a worker whose states a test sets; remembers what it was asked."""

    def __init__(self, state: str, attempts: int = 1) -> None:
        self.slot, self.state, self.responsive, self.free_bytes, self.cost = 0, "ready", True, 100, 0
        self.work_s = 0.0
        self.credits = SimpleNamespace(bulk_wait_s=0.0)
        self.models: dict[str, ModelStatus] = {}
        self.loads: list[bool] = []
        self.unloads: list[str] = []
        self.now(state, attempts)

    def now(self, state: str, attempts: int, **more: str) -> None:
        """The worker tells another state."""
        self.models = {MODEL: ModelStatus(MODEL, state, attempts=attempts, **more)}  # type: ignore[arg-type]

    def send_load(self, model: str, explicit: bool = False) -> bool:
        """Remember it."""
        self.loads.append(explicit)
        return True

    def send_unload(self, model: str) -> bool:
        """Remember it."""
        self.unloads.append(model)
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

    channels = [channel]
    return asyncio.run(Demand(among(channels, until), True).load(MODEL, True, LATER))


def test_a_request_asks_the_worker_that_unloads_the_model_to_load_it_again() -> None:
    channel = Asked("unloading")
    channels = [channel]
    Demand(among(channels), True).want(MODEL)
    assert channel.loads == [False]


def test_a_load_by_hand_outlasts_the_unloading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "ASK_EVERY_S", 0.0)
    channel = Asked("unloading")
    assert explicit_load(channel, [("available", 1), ("loading", 2), ("loaded", 2)]) == "loaded"
    assert channel.loads[:2] == [True, True], "asked again once the model is available"


def test_a_load_by_hand_that_somebody_gives_up_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "ASK_EVERY_S", 0.0)
    for steps in ([("loading", 2), ("available", 2)], [("available", 2)]):
        with pytest.raises(ModelNotLoaded, match="given up"):
            explicit_load(Asked("available"), steps)
    with pytest.raises(ModelNotLoaded, match="given up"):
        explicit_load(Asked("loading"), [("available", 1)])


def test_a_load_by_hand_outlasts_one_that_was_given_up_before() -> None:
    steps = [("available", 1), ("loading", 2), ("loaded", 2)]
    assert explicit_load(Asked("loading"), steps) == "loaded"
    assert explicit_load(Asked("available", 0), steps) == "loaded", "it was not heard of yet"
    with pytest.raises(ModelLoadFailed):
        explicit_load(Asked("loading"), [("failed", 1)])


def test_a_load_by_hand_is_told_to_a_worker_that_loads_the_model_or_has_it() -> None:
    """Somebody may have given that up just now, which this frontend has not heard of yet."""
    for state in ("loading", "loaded"):
        channel = Asked(state)
        assert explicit_load(channel, [("loaded", 1)]) == "loaded"
        assert channel.loads == [True]


def test_a_load_by_hand_of_a_model_that_some_worker_has_is_done() -> None:
    first, second = Asked("loading"), Asked("loaded")
    second.slot = 1

    async def until(done: Callable[[], bool]) -> None:
        first.now("failed", 1, error_class="UNKNOWN", error_message="no such program")
        assert done()

    channels = [first, second]
    assert asyncio.run(Demand(among(channels, until), True).load(MODEL, True, LATER)) == "loaded"
    assert (first.loads, second.loads) == ([], [True])


@pytest.mark.parametrize("state", ["available", "failed", "loaded"])
def test_an_unload_is_told_to_all_workers_and_waits_for_those_that_have_the_model(state: str) -> None:
    """One may be about to load it, for a request or because its last load failed, or be silent for a moment."""
    having, other = Asked("loaded"), Asked(state)
    other.slot, other.responsive = 1, False
    waits: list[bool] = []

    async def until(done: Callable[[], bool]) -> None:
        waits.append(done())
        having.now("unloading", 1)
        waits.append(done())

    channels = [having, other]
    asyncio.run(Demand(among(channels, until), True).unload(MODEL, False, LATER))
    assert having.unloads == other.unloads == [MODEL]
    assert waits == [False, True]


COMING: dict[str, str] = {"next": "new files"}
REFUSED = {**COMING, "error_class": "UNKNOWN", "error_message": "no such program"}


def renewal(channels: list[Asked], *steps: Callable[[], None]) -> None:
    """A wait until the workers serve the present files, while these things happen one after the other."""

    async def until(done: Callable[[], bool]) -> None:
        for step in steps:
            assert not done(), "it does not wait"
            step()
        assert done(), "it waits for ever"

    asyncio.run(Demand(among(channels, until), True)._renew(MODEL, LATER, always))


def test_a_load_waits_until_all_workers_have_changed_files() -> None:
    first, second, third = Asked("loaded"), Asked("loaded"), Asked("loaded")
    second.slot, third.slot = 1, 2
    for channel in (first, second):
        channel.now("loaded", 2, **COMING)
    renewal([first, second, third], lambda: first.now("loaded", 1), lambda: second.now("loaded", 1))
    assert not (first.loads or second.loads or third.loads), "nobody is asked for what is coming"


def test_a_load_tells_why_changed_files_are_refused() -> None:
    first, second = Asked("loaded"), Asked("loaded")
    second.slot = 1
    for channel in (first, second):
        channel.now("loaded", 2, **COMING)
    with pytest.raises(ModelLoadFailed, match="no such program"):
        renewal([first, second], lambda: second.now("loaded", 2, **REFUSED), lambda: first.now("loaded", 1))


def test_a_load_tries_again_what_was_refused_before() -> None:
    channel = Asked("loaded")
    channel.now("loaded", 2, **REFUSED)
    renewal([channel], lambda: channel.now("loaded", 3, **COMING), lambda: channel.now("loaded", 2))
    assert channel.loads == [True]
    channel.now("loaded", 2, **REFUSED)
    with pytest.raises(ModelLoadFailed):
        renewal([channel], lambda: channel.now("loaded", 3, **REFUSED))


def test_a_load_asks_again_who_is_still_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "ASK_EVERY_S", 0.0)
    waiting, serving = Asked("loaded"), Asked("loaded")
    waiting.now("loaded", 2, **COMING)
    serving.slot = 1
    renewal([waiting, serving], lambda: waiting.now("loaded", 1))
    assert waiting.loads == [True] and not serving.loads


def test_a_load_does_not_wait_for_a_worker_that_is_gone() -> None:
    channel = Asked("loaded")
    channel.now("loaded", 2, **COMING)
    renewal([channel], lambda: setattr(channel, "state", "lost"))


def test_what_requests_may_not_have_loaded_is_not_asked_for() -> None:
    having, other = Asked("loaded"), Asked("available")
    other.slot = 1
    channels = [having, other]
    made = Demand(among(channels), True)
    made.replicas, made.known = (lambda model: 2), lambda model: False
    made.tick()
    with pytest.raises(ModelNotFound):
        made.want(MODEL)
    assert not other.loads
    made._next_tick, made.known = 0.0, lambda model: True
    made.tick()
    assert other.loads == [False]


def test_a_load_that_was_asked_for_is_known_until_the_worker_had_time_to_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels = [Asked("available")]
    asking = Demand(among(channels), True)
    assert not asking.has_asked(MODEL)
    asking.want(MODEL)
    assert asking.has_asked(MODEL) and not asking.has_asked("org/other")
    monkeypatch.setattr(demand, "ASK_EVERY_S", 0.0)
    assert not asking.has_asked(MODEL)


def test_what_the_worker_tells_after_it_was_asked_is_believed() -> None:
    channel = Asked("available")
    channels = [channel]
    asking = Demand(among(channels), True)
    asking.want(MODEL)
    assert asking.has_asked(MODEL)
    channel.now("available", attempts=1)
    assert not asking.has_asked(MODEL), "the model was loaded and went again"


def test_a_load_by_name_says_nothing_to_a_worker_once_the_model_is_unloaded() -> None:
    """Otherwise the worker would load what the mark says nobody wants."""
    channel = Asked("available")
    asking = Demand(among([channel]), on_demand=True)
    with pytest.raises(ModelNotLoaded, match="the model was unloaded meanwhile"):
        asyncio.run(asking.load(MODEL, True, LATER, lambda: False))
    channel.now("loaded", 1, next="newer", error_class="UNKNOWN")
    with pytest.raises(ModelNotLoaded, match="the model was unloaded meanwhile"):
        asyncio.run(asking._renew(MODEL, LATER, lambda: False))
    assert channel.loads == []
