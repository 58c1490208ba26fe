"""Loads that a frontend asks workers for: on demand, for more copies of a busy model, and by name.

1. `want` is called for every request whose model no worker has. The frontend asks the worker that placement names, at
   most once a second. A worker that still unloads the model may be asked too: the worker loads the model afterwards.
2. `tick` looks at all models. A model that keeps its workers busy, or that has fewer workers than its entry asks for,
   gets another worker.
3. `load` and `unload` are orders of an operator, by name; they wait until the workers report the end. A load waits
   first for workers that serve older files of the model.

Placement is a pure policy, so that frontends with the same view decide the same.

1. A model that no worker has goes to the worker with most free memory, among equal ones to the lowest slot.
2. A model that some worker has or loads is not loaded elsewhere only because there is room.
3. A model that keeps all its workers busy for some time gets another worker, if it fits there without an eviction.
4. A model with `replicas` in its catalog entry gets that many workers as soon as one worker has the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from frontend.engine.interface import Wanted, always, why_failed
from frontend.engine.local import routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.routing import Workers
from ipc.errors import ModelNotFound, ModelNotLoaded, NoReplica
from ipc.wire.messages import ModelStatus

BUSY_WAIT_S = 1.0
"""A worker is busy while the waiting work takes longer than this."""
BUSY_SHARE = 0.5
"""A model keeps a worker busy if at least this part of the worker's outstanding work is of the model."""
BUSY_AFTER_S = 3.0
PRESENT = ("loaded", "loading")
ASK_EVERY_S = 1.0
TICK_EVERY_S = 0.5
_GIVEN_UP = "the load was given up: the model was unloaded meanwhile"
_NOTHING = ModelStatus("", "available")
_HELD = (*PRESENT, "unloading")


class View(NamedTuple):
    """One worker that answers, as the placement of one model sees it.

    `state`: of the model on this worker. `wait_s`: time until the worker's queue is done. `share`: part of the queue
    that is of this model, 0 to 1, as far as the deciding frontend knows.
    """

    slot: int
    state: str
    free_bytes: int
    wait_s: float = 0.0
    share: float = 0.0
    memory_bytes: int = 0


def cold(views: Sequence[View]) -> int | None:
    """The slot to load a model on. None if a worker has or loads the model, or none can."""
    if any(view.state in PRESENT for view in views):
        return None
    return _roomiest([view for view in views if view.state == "available"])


def _roomiest(views: Sequence[View]) -> int | None:
    best = min(views, key=lambda view: (-view.free_bytes, view.slot), default=None)
    return None if best is None else best.slot


def spare(views: Sequence[View]) -> int | None:
    """The slot for one more copy: a worker where the model is available and fits into what is free."""
    need = max((view.memory_bytes for view in views if view.state == "loaded"), default=0)
    return _roomiest([view for view in views if view.state == "available" and view.free_bytes >= need])


def lacking(views: Sequence[View], replicas: int) -> int | None:
    """The slot to load a model on that fewer workers have than its entry asks for; None when all is well."""
    present = [view for view in views if view.state in PRESENT]
    if not any(view.state == "loaded" for view in views) or len(present) >= replicas:
        return None
    return spare(views)


def is_busy(views: Sequence[View]) -> bool:
    """Whether the model keeps every worker that has the model busy, and no worker is loading the model."""
    if any(view.state == "loading" for view in views):
        return False
    having = [view for view in views if view.state == "loaded"]
    return bool(having) and all(view.wait_s >= BUSY_WAIT_S and view.share >= BUSY_SHARE for view in having)


class BusyWatch:
    """Remembers since when models keep their workers busy."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def another(self, model: str, views: Sequence[View], now: float) -> int | None:
        """The slot for one more copy of a model that has been busy for `BUSY_AFTER_S`; the time starts again then."""
        if not is_busy(views):
            self._since.pop(model, None)
            return None
        if now - self._since.setdefault(model, now) < BUSY_AFTER_S:
            return None
        slot = spare(views)
        if slot is not None:
            self._since[model] = now
        return slot


class Asked(NamedTuple):
    """When a worker was asked for a model last (monotonic seconds), and the state that was known then."""

    at_s: float
    told: ModelStatus | None


_NEVER = Asked(-math.inf, None)


class Demand:
    """Asks the workers of this frontend's channels."""

    def __init__(self, workers: Workers, on_demand: bool) -> None:
        self._workers, self._on_demand = workers, on_demand
        self._asked: dict[tuple[int, str], Asked] = {}
        self._busy = BusyWatch()
        self._next_tick = 0.0
        self.replicas: Callable[[str], int] = lambda model: 1
        """Workers that a model should have, by its name."""
        self.known: Callable[[str], bool] = lambda model: True
        """Whether the catalog has a model (still) that requests may have loaded."""

    def want(self, model: str, slot: int | None = None) -> None:
        """A request waits for a model that nobody has, or not the worker in `slot`, which alone will do.

        Raises `ModelNotFound` when the catalog has lost the model.
        """
        if not self.known(model):
            raise ModelNotFound(f"Model '{model}' not found")
        if self._on_demand:
            if slot is None:
                views = self._views(model)
                slot = cold(views)
                slot = cold(_afterwards(views)) if slot is None else slot
            self._ask(slot, model)

    def tick(self) -> None:
        """Look after busy models and replicas; called ten times a second, does something twice a second."""
        now = time.monotonic()
        if now < self._next_tick or not self._on_demand:
            return
        self._next_tick = now + TICK_EVERY_S
        up = self._up()
        if len(up) < 2:
            return
        for model in sorted(
            {name for c in up for name, status in c.models.items() if status.state == "loaded"}
        ):
            if not self.known(model):
                continue
            views = self._views(model)
            slot = lacking(views, self.replicas(model))
            self._ask(self._busy.another(model, views, now) if slot is None else slot, model)

    def _up(self) -> list[Channel]:
        return [channel for channel in self._workers.channels if channel.responsive]

    def _ask(self, slot: int | None, model: str) -> None:
        now = time.monotonic()
        if slot is None or now - self._asked.get((slot, model), _NEVER).at_s < ASK_EVERY_S:
            return
        for channel in self._workers.channels:
            if channel.slot == slot and channel.send_load(model):
                self._asked[slot, model] = Asked(now, channel.models.get(model))

    def has_asked(self, model: str) -> bool:
        """Whether a worker was asked for a model just now and has told nothing of the model since."""
        since = time.monotonic() - ASK_EVERY_S
        asked = [
            (self._asked.get((c.slot, model), _NEVER), c.models.get(model)) for c in self._workers.channels
        ]
        return any(last.at_s > since and last.told is told for last, told in asked)

    def _views(self, model: str) -> list[View]:
        return [_view(channel, model) for channel in self._up() if model in channel.models]

    async def load(self, model: str, wait: bool, deadline_ns: int, is_wanted: Wanted = always) -> str:
        """Load a model although its last load may have failed; returns its state, `loading` only unless `wait`.

        With `wait`, all workers that serve older files of the model have to load the present ones, too. `is_wanted` is
        asked before each word to a worker. Raises what keeps the model from loading, `ModelNotLoaded` if the model is
        wanted no more, and `DeadlineExceeded`.
        """
        if wait:
            await self._renew(model, deadline_ns, is_wanted)
        up = self._up()
        views = self._views(model)
        present = [view for state in PRESENT for view in views if view.state == state]
        anywhere = [view._replace(state="available") for view in views]
        slot = present[0].slot if present else cold(anywhere)
        channel = next((c for c in up if c.slot == slot), None)
        if channel is None:
            raise NoReplica("no worker is up that knows this model", retry_after_s=2)
        _refuse_unwanted(is_wanted)
        attempts = channel.models[model].attempts
        seen, asked = False, time.monotonic()
        # NOTE: ask a worker that has or loads the model too: an unload of the model may be on its way.
        channel.send_load(model, explicit=True)
        self._asked[channel.slot, model] = Asked(asked, channel.models[model])

        def status() -> ModelStatus:
            if channel.state != "ready":
                raise NoReplica("the worker that loaded the model is gone", retry_after_s=2)
            return channel.models.get(model, _NOTHING)

        def done() -> bool:
            nonlocal seen, asked
            present, late = status(), time.monotonic() - asked >= ASK_EVERY_S
            seen = seen or present.state == "loading" or present.attempts > attempts
            if present.state == "available":
                # NOTE: an earlier load that was given up ends first. Only then the load asked for here begins.
                if late and not seen:
                    _refuse_unwanted(is_wanted)
                    asked = time.monotonic()
                    channel.send_load(model, explicit=True)
                return late and seen
            if present.state == "loading":
                return not wait
            return present.state == "loaded" or (seen and present.state == "failed")

        await self._workers.wait(done, deadline_ns)
        state = status().state
        if state == "available":
            raise ModelNotLoaded(_GIVEN_UP, retry_after_s=1)
        if state == "failed":
            raise routing.explain([channel], model)
        return state

    async def _renew(self, model: str, deadline_ns: int, is_wanted: Wanted) -> None:
        """Wait until all workers that serve older files of a model serve the present ones.

        A load that failed before is tried again, and a worker that is still behind after a while is asked again. Raises
        why a worker cannot load the present files, and `DeadlineExceeded`; that worker goes on with the older ones.
        """
        behind = [channel for channel in self._up() if channel.models.get(model, _NOTHING).next]
        failed = {c.slot: c.models[model].attempts for c in behind if c.models[model].error_class}
        _refuse_unwanted(is_wanted)
        for channel in behind:
            if channel.slot in failed:
                channel.send_load(model, explicit=True)
        asked = time.monotonic()

        def refuses(channel: Channel) -> bool:
            status = channel.models.get(model, _NOTHING)
            if channel.state != "ready" or not (status.next and status.error_class):
                return False
            return status.attempts > failed.get(channel.slot, -1)

        def ended(channel: Channel) -> bool:
            status = channel.models.get(model, _NOTHING)
            return channel.state != "ready" or not status.next or refuses(channel)

        def done() -> bool:
            nonlocal asked
            waiting = [channel for channel in behind if not ended(channel)]
            if waiting and time.monotonic() - asked >= ASK_EVERY_S:
                _refuse_unwanted(is_wanted)
                asked = time.monotonic()
                for channel in waiting:
                    channel.send_load(model, explicit=True)
            return not waiting

        await self._workers.wait(done, deadline_ns)
        refusing = next((channel for channel in behind if refuses(channel)), None)
        if refusing is not None:
            raise why_failed(refusing.models[model])

    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        """Unload a model from every worker; returns `available`, or `unloading` unless `wait`.

        Workers that do not have the model are told as well: they may be about to load it. Raises `DeadlineExceeded`.
        """
        having = [c for c in self._up() if c.models.get(model, _NOTHING).state in _HELD]
        attempts = {c.slot: c.models[model].attempts for c in having}
        for channel in self._workers.channels:
            if model in channel.models:
                channel.send_unload(model)

        def gone(channel: Channel) -> bool:
            status = channel.models.get(model, _NOTHING)
            if channel.state != "ready" or status.state not in _HELD:
                return True
            return status.attempts > attempts[channel.slot] or (not wait and status.state == "unloading")

        await self._workers.wait(lambda: all(gone(channel) for channel in having), deadline_ns)
        states = {c.models.get(model, _NOTHING).state for c in having}
        return "unloading" if "unloading" in states else "available"


def _refuse_unwanted(is_wanted: Wanted) -> None:
    if not is_wanted():
        raise ModelNotLoaded(_GIVEN_UP, retry_after_s=1)


def _afterwards(views: Sequence[View]) -> list[View]:
    """The workers as they will be once what they unload has gone."""
    return [view._replace(state="available") if view.state == "unloading" else view for view in views]


def _view(channel: Channel, model: str) -> View:
    status = channel.models[model]
    return View(
        channel.slot,
        status.state,
        channel.free_bytes,
        max(channel.credits.bulk_wait_s, channel.work_s),
        channel.cost_of(model) / channel.cost if channel.cost else 0.0,
        status.memory_bytes,
    )
