"""The figures that a worker sends to the frontends that watch the worker, and to anybody who looks at the worker.

States of models are shown to people `folded`: a profile is mentioned where its state differs from that of its model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from ipc.catalog.ids import profiled
from ipc.wire.messages import ModelStatus, Welcome, Wire


class QueueState(Wire, frozen=True):
    """Waiting work of one model, and the seconds that the oldest item has waited."""

    model: str
    items: int
    tokens: int
    oldest_s: float


class BatchRecord(Wire, frozen=True):
    """One batch: when it ended (CLOCK_MONOTONIC), how long it took, what was in it, how much would have fitted.

    `tokens` counts the tokens of items that ran to their end: none in a failed batch, or once all callers have gone.
    """

    at_ns: int
    seconds: float
    model: str
    items: int
    tokens: int
    budget: int


class GenerationStats(Wire, frozen=True):
    """Sequences, cache and counts of one loaded model that generates (`workers.generation.engine.Engine.statistics`).

    Of at most `capacity` sequences `running` are computed together. The numbers from `prompt_tokens` on only rise
    while the model stays loaded. A lookup asks the cache once for the beginning of one sequence; a hit found a block.
    Of a model that sees, `pictures` went through the vision tower, and features of pictures take `feature_bytes`. A
    lookup of features asks for one picture.
    """

    model: str
    capacity: int
    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    prefix_lookups: int
    prefix_hits: int
    prefix_evictions: int
    pictures: int = 0
    feature_bytes: int = 0
    feature_lookups: int = 0
    feature_hits: int = 0
    feature_evictions: int = 0


class Stats(Wire, frozen=True, tag="stats"):
    """The figures of a worker, for frontends that watch the worker.

    Memory in bytes: of the device; on CPU resident memory and the host's. `utilization` is what the device says of the
    last second and `busy` the share of the time in which batches ran, both 0 to 1; `cpu` is the processor time of this
    process per second. A value that nobody can tell is None.
    """

    memory_used: int
    memory_total: int
    resident: int
    cpu: float
    busy: float
    utilization: float | None
    temperature_c: float | None
    budget: int
    admitted: int
    bound: int
    arena_used: int
    arena_total: int
    leases: int
    queues: list[QueueState]
    batches: list[BatchRecord]
    generations: list[GenerationStats] = msgspec.field(default_factory=list)


class Look(Wire, frozen=True, tag="look"):
    """Somebody without a session asks what the worker does. The question changes nothing."""


class SessionState(Wire, frozen=True):
    """A frontend as the worker sees the frontend: open requests, their cost, and the time since its last ping."""

    slot: str
    pid: int
    requests: int
    cost: int
    silent_s: float


class Looked(Wire, frozen=True, tag="looked"):
    """The answer to `Look`."""

    welcome: Welcome
    stats: Stats
    sessions: list[SessionState]
    draining: bool


def models_ready(statuses: Iterable[ModelStatus]) -> str:
    """`1/2 models ready`. A model is ready when the model or one of its profiles is loaded."""
    states = {status.name: status.state for status in statuses}
    models = {profiled(name, states) for name in states}
    ready = {profiled(name, states) for name, state in states.items() if state == "loaded"}
    return f"{len(ready)}/{len(models)} models ready"


class Folded(msgspec.Struct, frozen=True):
    """A status, and the names of the model and of all profiles for which the status stands."""

    status: ModelStatus
    names: list[str]


def folded(statuses: Collection[ModelStatus]) -> list[Folded]:
    """The statuses of one worker or server; a profile that says the same as its model is folded under the model."""
    by_name = {status.name: status for status in statuses}
    models: dict[str, Folded] = {}
    for status in statuses:
        model = profiled(status.name, by_name)
        shown = model if _told(by_name[model]) == _told(status) else status.name
        models.setdefault(shown, Folded(by_name[shown], [])).names.append(status.name)
    return list(models.values())


def _told(status: ModelStatus) -> tuple[object, ...]:
    """What people are told of a model besides the name."""
    error = (status.error_class, status.error_message)
    return (status.state, status.device, status.progress, status.memory_bytes, *error)
