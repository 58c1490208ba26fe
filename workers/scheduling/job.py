"""One request inside a worker: what it asks for, where its results go, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ipc.memory.arena import Block
from ipc.wire.messages import BatchTimes, ItemError, TensorInfo, TensorRef, Trace, Work
from workers.adapters.base import Prepared
from workers.inputs import NOTHING, Payload


@dataclass(slots=True, eq=False)
class Output:
    """Reserved space of one request: a block of the arena, or private bytes when the result is small.

    `arrays` are writable numpy views by tensor name, first dimension = item.
    """

    block: Block | None
    buffer: memoryview | bytes
    arrays: dict[str, np.ndarray]


class JobTrace:
    """The instants of one traced request, in CLOCK_MONOTONIC nanoseconds.

    They are kept in memory and sent back with the result; the frontend makes spans of them.
    """

    __slots__ = ("_batches", "_began_ns", "_ended_ns")

    def __init__(self) -> None:
        self._began_ns = self._ended_ns = 0
        self._batches: list[BatchTimes] = []

    def prepared(self, began_ns: int, ended_ns: int) -> None:
        """Some items of the request were prepared."""
        self._began_ns = self._began_ns or began_ns
        self._ended_ns = ended_ns

    def ran(self, batch: BatchTimes) -> None:
        """The request took part in a batch."""
        self._batches.append(batch)

    def record(self, queued_ns: int) -> Trace:
        """All of it, for the result."""
        return Trace(self._began_ns, self._ended_ns, queued_ns, self._batches)


@dataclass(slots=True, eq=False)
class Job:
    """A submitted request: `work` is what a frontend planned. Times are CLOCK_MONOTONIC nanoseconds.

    strategy   its `workers.scheduling.strategy.Strategy`, which keeps what it knows of the job in `kept`
    cost       tokens: the estimate of `work` at first, the real number once all is prepared
    counted    tokens that the bound of the queue counts now; `begun` are those that the device has begun
    resting    whether the queue does not count it, since it waits for its own client or has its sequences in an engine
    group      jobs of equal groups may share a batch
    starts     first row of each item (and the end) in tensors with many rows per item
    loose      values whose size the model decides, by name and item
    claims     how many threads may still read its input or write to its output
    infos      the outputs of an infer call
    told_prepare_ns  the part of `prepare_ns` that its runs have counted; `collate_ns` is a part of `device_ns`
    apart      whether no other may share a step with its generated text
    ordered    whether its answer must not pass those of earlier jobs of its model
    """

    session: bytes
    tag: int
    id: int
    work: Work
    adapter: Any
    strategy: Any = None
    solo: bool = False
    payload: Payload = NOTHING
    group: Hashable = None
    kept: Any = None
    cost: int = field(init=False)
    open_items: int = field(init=False)
    prepared: list[Prepared] = field(init=False)
    trace: JobTrace | None = field(init=False)
    ordered: bool = False
    apart: bool = False
    resting: bool = False
    refs: list[TensorRef] = field(default_factory=list)
    result_nbytes: int = 0
    starts: dict[str, list[int]] = field(default_factory=dict)
    loose: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    output: Output | None = None
    infos: list[TensorInfo] = field(default_factory=list)
    errors: dict[int, ItemError] = field(default_factory=dict)
    prepared_items: int = 0
    claims: int = 0
    counted: int = 0
    begun: int = 0
    queued_ns: int = 0
    first_queued_ns: int = 0
    first_run_ns: int = 0
    prepare_ns: int = 0
    told_prepare_ns: int = 0
    device_ns: int = 0
    collate_ns: int = 0
    copy_ns: int = 0
    batches: int = 0
    state: str = "open"

    def __post_init__(self) -> None:
        """Begin with what the frontend estimated."""
        self.cost, self.open_items = self.work.cost, len(self.work.call.items)
        self.prepared = [None] * self.open_items  # type: ignore[list-item]
        self.trace = JobTrace() if self.work.traceparent else None

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.work.model

    def is_late(self, now_ns: int) -> bool:
        """Whether it has waited for too long; the strategy says whether a job that has begun may go on."""
        work = self.work
        if self.first_run_ns:
            return bool(self.strategy.ends_late) and now_ns >= work.deadline_ns
        return now_ns >= work.waits_until_ns


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of one job, as it takes part in a batch."""

    job: Job
    index: int
    prepared: Prepared


@dataclass(slots=True, eq=False)
class Batch:
    """Pieces of one group, collated for the adapter (None: collating failed and is tried again piecewise).

    `predicted_s` is the device time for which the queue has charged the group and that has not been settled.
    `full`: work of the model was left waiting when the batch was taken. `lacks_memory`: the batch goes on when no other
    batch is suspended. `turn` is the computation once the computation has begun, and `limit_s` is the time that the
    watchdog allows. `seconds` is the time on the device, `paused_ns` the time in which the batch was suspended, last at
    `suspended_ns`.
    """

    pieces: list[Piece]
    collated: Any
    tokens: int
    predicted_s: float
    full: bool = False
    overtaken: bool = False
    lacks_memory: bool = False
    turn: Any = None
    limit_s: float = 0.0
    seconds: float = 0.0
    paused_ns: int = 0
    suspended_ns: int = 0

    @property
    def first(self) -> Job:
        """Any job of the batch: model, adapter, strategy and options are the same for all."""
        return self.pieces[0].job


def collate(pieces: list[Piece]) -> Any:
    """What the adapter makes of these pieces."""
    return pieces[0].job.adapter.collate([piece.prepared for piece in pieces])
