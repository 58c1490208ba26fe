"""On which worker a model is loaded: a pure policy, so that all frontends that see the same decide the same.

1. A model that no worker has goes to the worker with most free memory; of equal ones to the lowest slot.
2. It stays there: a model that some worker has or loads is not loaded elsewhere only because there is room.
3. A model that keeps all its workers busy for some time gets another one, if it fits there without an eviction.
4. A model with `replicas` in its catalog entry gets that many workers as soon as it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BUSY_WAIT_S = 1.0
"""A worker is busy while what waits there takes longer than this."""
BUSY_SHARE = 0.5
"""Part of a worker's outstanding work that a model must be, to be what keeps it busy."""
BUSY_AFTER_S = 3.0
PRESENT = ("loaded", "loading")


class View(NamedTuple):
    """One worker that answers, as the placement of one model sees it.

    `state` is that of the model there, `wait_s` the time that the worker's queue takes, and `share` the part of it
    that is this model, 0 to 1, as far as the deciding frontend knows.
    """

    slot: int
    state: str
    free_bytes: int
    wait_s: float = 0.0
    share: float = 0.0
    memory_bytes: int = 0


def cold(views: Sequence[View]) -> int | None:
    """The slot to load a model on that nobody has; None when somebody has or loads it, or nobody can."""
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
    """Whether every worker that has the model is kept busy by it, and none is loading it yet."""
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
