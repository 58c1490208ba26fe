"""Which worker takes a request: model loaded, answering, in credit, and then the least outstanding cost.

When none fits, the error says why, and how long it will last: from the drain rate of the workers, or the load time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ipc.channel import Channel
from ipc.errors import (
    DependencyConflict,
    ModelLoadFailed,
    ModelLoading,
    ModelNotLoaded,
    NoReplica,
    PenstockError,
    QueueFull,
)


def retry_after_s(channels: Sequence[Channel]) -> float:
    """Whole seconds until the least loaded of these workers has drained what it holds; at least 1."""
    waits = [c.credits.queued / c.credits.rate for c in channels if c.credits.rate > 0]
    return float(max(1, math.ceil(min(waits)))) if waits else 1.0


def has_credit(channel: Channel, lane: str) -> bool:
    """Whether this frontend may send more cost of that lane there. One request is always allowed."""
    return channel.cost_in(lane) == 0 or channel.cost_in(lane) < channel.credits.limit


def loaded(channels: Sequence[Channel], model: str) -> list[Channel]:
    """Channels whose worker answers and has the model; raises the error of `explain` when there is none."""
    able = [c for c in channels if c.responsive and model in c.models and c.models[model].state == "loaded"]
    if not able:
        raise explain(channels, model)
    return able


def pick(channels: Sequence[Channel], model: str, lane: str, *, avoid: Collection[int] = ()) -> Channel:
    """The channel to use; `avoid` names slots to leave out if there is another.

    Raises the error of `explain` when no worker has the model, `QueueFull` when all that have it are out of credits.
    """
    able = loaded(channels, model)
    preferred = [c for c in able if c.slot not in avoid] or able
    open_ = [c for c in preferred if has_credit(c, lane)]
    if not open_:
        raise QueueFull(
            "the queue of every worker with this model is full", retry_after_s=retry_after_s(able)
        )

    def wait_s(channel: Channel) -> float:
        return (channel.cost + channel.foreign_cost) / max(channel.credits.rate, 1.0)

    return min(open_, key=lambda c: (wait_s(c), c.cost, c.slot))


def explain(channels: Sequence[Channel], model: str) -> PenstockError:
    """Why no worker can run `model` now."""
    up = [c for c in channels if c.state == "ready"]
    found = [c.models[model] for c in up if model in c.models]
    if not up or any(status.state == "loaded" for status in found):
        return NoReplica("no worker is up", retry_after_s=2)
    # A worker loads its whole catalog, so a model that is only available will be loaded in its turn.
    if any(status.state in ("available", "loading", "unloading") for status in found):
        expected = max((s.load_s * (1 - s.progress) for s in found if s.state == "loading"), default=0.0)
        return ModelLoading(f"Model '{model}' is loading", retry_after_s=max(1, math.ceil(expected or 5)))
    failed = [status for status in found if status.state == "failed"]
    if failed:
        worst = failed[0]
        if worst.error_class == "DEPENDENCY":
            return DependencyConflict(worst.error_message, compatible_bundles=[])
        return ModelLoadFailed(
            worst.error_message,
            error_class=worst.error_class,
            attempts=worst.attempts,
            permanent=worst.permanent,
        )
    return ModelNotLoaded(f"Model '{model}' is not loaded", retry_after_s=5)
