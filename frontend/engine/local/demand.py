"""A frontend's asking for models: who should load what, by `frontend.engine.local.placement`, and the explicit
loads and unloads.

1. `want` is called for every request whose model no worker has; the worker that placement names is asked at most once
   a second. One that still unloads the model may be asked too: it loads it again afterwards.
2. `tick` looks at all models: one that keeps its workers busy, or that has fewer workers than its entry asks for, gets
   another one.
3. `load` and `unload` are what an operator asks for by name; they wait until the workers say that it is done. `renew`
   is the part of a load that concerns workers which serve the model as its files were before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from frontend.engine.local import placement, routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.placement import View
from frontend.engine.local.workers import Workers
from ipc.errors import ModelNotFound, ModelNotLoaded, NoReplica
from ipc.wire.messages import ModelStatus

ASK_EVERY_S = 1.0
TICK_EVERY_S = 0.5


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
        self._busy = placement.BusyWatch()
        self._next_tick = 0.0
        self.replicas: Callable[[str], int] = lambda model: 1
        """Workers that a model should have, by its name."""
        self.known: Callable[[str], bool] = lambda model: True
        """Whether the catalog has a model (still) that requests may have loaded."""

    def want(self, model: str, slot: int | None = None) -> None:
        """A request waits for a model that nobody has, or not the worker in `slot`, which alone will do.

        Raises `ModelNotFound` when the catalog has lost it.
        """
        if not self.known(model):
            raise ModelNotFound(f"Model '{model}' not found")
        if self._on_demand:
            if slot is None:
                views = self._views(model)
                slot = placement.cold(views)
                slot = placement.cold(_afterwards(views)) if slot is None else slot
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
            slot = placement.lacking(views, self.replicas(model))
            self._ask(self._busy.another(model, views, now) if slot is None else slot, model)

    def _up(self) -> list[Channel]:
        return [channel for channel in self._workers.channels if channel.responsive]

    def _ask(self, slot: int | None, model: str) -> None:
        now = time.monotonic()
        if slot is None or now - self._asked.get((slot, model), _NEVER).at_s < ASK_EVERY_S:
            return
        for channel in self._workers.channels:
            if channel.slot == slot and channel.load(model):
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

    async def load(self, model: str, wait: bool, deadline_ns: int) -> str:
        """Load a model although its last load may have failed; returns its state, `loading` only unless `wait`.

        Raises what keeps the model from being loaded, and `DeadlineExceeded`.
        """
        up = self._up()
        views = self._views(model)
        present = [view for state in placement.PRESENT for view in views if view.state == state]
        anywhere = [view._replace(state="available") for view in views]
        slot = present[0].slot if present else placement.cold(anywhere)
        channel = next((c for c in up if c.slot == slot), None)
        if channel is None:
            raise NoReplica("no worker is up that knows this model", retry_after_s=2)
        attempts = channel.models[model].attempts
        seen, asked = False, time.monotonic()
        # NOTE: also to one that has it, or loads it: somebody may have given it up just now.
        channel.load(model, explicit=True)
        self._asked[channel.slot, model] = Asked(asked, channel.models[model])

        def status() -> ModelStatus:
            if channel.state != "ready":
                raise NoReplica("the worker that loaded the model is gone", retry_after_s=2)
            return channel.models.get(model, _NOTHING)

        def done() -> bool:
            nonlocal seen, asked
            found, late = status(), time.monotonic() - asked >= ASK_EVERY_S
            seen = seen or found.state == "loading" or found.attempts > attempts
            if found.state == "available":
                # NOTE: a load that somebody gave up before ends at first; only then the one that is asked for begins.
                if late and not seen:
                    asked = time.monotonic()
                    channel.load(model, explicit=True)
                return late and seen
            if found.state == "loading":
                return not wait
            return found.state == "loaded" or (seen and found.state == "failed")

        await self._workers.wait(done, deadline_ns)
        found = status()
        if found.state == "available":
            raise ModelNotLoaded("the load was given up: the model was unloaded meanwhile", retry_after_s=1)
        if found.state == "failed":
            raise routing.explain([channel], model)
        return found.state

    async def renew(self, model: str, deadline_ns: int) -> None:
        """Wait until all workers that serve older files of a model serve the present ones.

        A load that failed before is tried again, and a worker that is still behind after a while is asked again. Raises
        why a worker cannot load the present files, and `DeadlineExceeded`; that worker goes on with the older ones.
        """
        behind = [channel for channel in self._up() if channel.models.get(model, _NOTHING).next]
        failed = {c.slot: c.models[model].attempts for c in behind if c.models[model].error_class}
        for channel in behind:
            if channel.slot in failed:
                channel.load(model, explicit=True)
        asked = time.monotonic()

        def refuses(channel: Channel) -> bool:
            found = channel.models.get(model, _NOTHING)
            if channel.state != "ready" or not (found.next and found.error_class):
                return False
            return found.attempts > failed.get(channel.slot, -1)

        def ended(channel: Channel) -> bool:
            found = channel.models.get(model, _NOTHING)
            return channel.state != "ready" or not found.next or refuses(channel)

        def done() -> bool:
            nonlocal asked
            waiting = [channel for channel in behind if not ended(channel)]
            if waiting and time.monotonic() - asked >= ASK_EVERY_S:
                asked = time.monotonic()
                for channel in waiting:
                    channel.load(model, explicit=True)
            return not waiting

        await self._workers.wait(done, deadline_ns)
        refusing = next((channel for channel in behind if refuses(channel)), None)
        if refusing is not None:
            raise routing.why_failed(refusing.models[model])

    async def unload(self, model: str, wait: bool, deadline_ns: int) -> str:
        """Unload a model from every worker; returns `available`, or `unloading` unless `wait`.

        Workers that do not have the model are told as well: they may be about to load it. Raises `DeadlineExceeded`.
        """
        having = [c for c in self._up() if c.models.get(model, _NOTHING).state in _HELD]
        attempts = {c.slot: c.models[model].attempts for c in having}
        for channel in self._workers.channels:
            if model in channel.models:
                channel.unload(model)

        def gone(channel: Channel) -> bool:
            found = channel.models.get(model, _NOTHING)
            ended = channel.state != "ready" or found.state not in _HELD
            return (
                ended or found.attempts > attempts[channel.slot] or (not wait and found.state == "unloading")
            )

        await self._workers.wait(lambda: all(gone(channel) for channel in having), deadline_ns)
        states = {c.models.get(model, _NOTHING).state for c in having}
        return "unloading" if "unloading" in states else "available"


_NOTHING = ModelStatus("", "available")
_HELD = (*placement.PRESENT, "unloading")


def _afterwards(views: Sequence[View]) -> list[View]:
    """The workers as they will be once what they unload has gone."""
    return [view._replace(state="available") if view.state == "unloading" else view for view in views]


def _view(channel: Channel, model: str) -> View:
    status = channel.models[model]
    rate = max(channel.credits.rate, 1.0)
    return View(
        channel.slot,
        status.state,
        channel.free_bytes,
        max(channel.credits.queued, channel.cost) / rate,
        channel.cost_of(model) / channel.cost if channel.cost else 0.0,
        status.memory_bytes,
    )
