"""One request inside a worker: its items, where its results go, and what has become of it so far."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ipc.memory.leases import Block
from ipc.wire.messages import Call, ItemError, TensorInfo, TensorRef
from workers.adapters.base import Gathering, Prepared
from workers.memory.payload import NOTHING, Payload

if TYPE_CHECKING:
    from workers.reporting.tracing import JobTrace
    from workers.strategies.sequences import Turn
    from workers.strategies.streamed import Streamed


@dataclass(slots=True, eq=False)
class Output:
    """Reserved space of one request: a block of the arena, or private bytes when the result is small.

    `arrays` are writable numpy views by tensor name, first dimension = item.
    """

    block: Block | None
    buffer: memoryview | bytes
    arrays: dict[str, np.ndarray]


@dataclass(slots=True, eq=False)
class Job:
    """A submitted request. Times are CLOCK_MONOTONIC nanoseconds; cost is in tokens.

    `starts` is the first row of each item (and the end) in tensors with many rows per item; `loose` keeps values whose
    size the model decides, by name and item. `claims` counts who may still read its input or write to its output: a
    preparing thread, the device. `infos` are the outputs of an infer call. `gathering` says whether it waits for others
    to share a batch with, `batch_tokens` is the limit of its adapter for such a batch, `turn` is its place in a
    sequence, `ordered` jobs are answered in the order of their arrival, `stream` is of one that is answered in parts.
    `start_by_ns` is as in `Submit`.
    """

    session: bytes
    tag: int
    id: int
    model: str
    call: Call
    deadline_ns: int
    request_id: str
    solo: bool
    cost: int
    payload: Payload = NOTHING
    prepared: list[Prepared] = field(default_factory=list)
    group: Hashable = None
    lane: str = "interactive"
    caller: str = ""
    share: float = 1.0
    adapter: Any = None
    gathering: Gathering | None = None
    batch_tokens: int | None = None
    turn: Turn | None = None
    ordered: bool = False
    stream: Streamed | None = None
    start_by_ns: int = 0
    refs: list[TensorRef] = field(default_factory=list)
    result_nbytes: int = 0
    starts: dict[str, list[int]] = field(default_factory=dict)
    loose: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    output: Output | None = None
    infos: list[TensorInfo] = field(default_factory=list)
    errors: dict[int, ItemError] = field(default_factory=dict)
    open_items: int = 0
    prepared_items: int = 0
    claims: int = 0
    queued_ns: int = 0
    first_run_ns: int = 0
    prepare_ns: int = 0
    device_ns: int = 0
    copy_ns: int = 0
    batches: int = 0
    trace: JobTrace | None = None
    state: str = "open"

    def is_late(self, now_ns: int) -> bool:
        """Whether it has waited for too long; what has begun on the device goes on, but for streams."""
        if self.first_run_ns and self.stream is None:
            return False
        waits = not self.first_run_ns and 0 < self.start_by_ns <= now_ns
        return waits or now_ns >= self.deadline_ns


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of one job, as it takes part in a batch."""

    job: Job
    index: int
    prepared: Prepared
