"""What traced requests went through in this worker.

Only instants are kept, in memory, and sent back with the result; the frontend makes spans of them. A request that is
not traced costs one comparison for each of its items.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipc.wire.messages import BatchTimes, Trace
from workers.scheduling.job import Job, Piece


class JobTrace:
    """The instants of one traced request, in CLOCK_MONOTONIC nanoseconds; `parent` is its traceparent."""

    __slots__ = ("_batches", "_began_ns", "_ended_ns", "parent")

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self._began_ns = self._ended_ns = 0
        self._batches: list[BatchTimes] = []

    def prepared(self, began_ns: int, ended_ns: int) -> None:
        """Some of its items were prepared."""
        self._began_ns = self._began_ns or began_ns
        self._ended_ns = ended_ns

    def ran(self, batch: BatchTimes) -> None:
        """It took part in a batch."""
        self._batches.append(batch)

    def record(self, queued_ns: int) -> Trace:
        """All of it, for the result."""
        return Trace(self._began_ns, self._ended_ns, queued_ns, self._batches)


def begin(traceparent: str) -> JobTrace | None:
    """A trace when the frontend asks for one: it names the span of sampled requests only."""
    return JobTrace(traceparent) if traceparent else None


def note_batch(pieces: Sequence[Piece], began_ns: int, computed_ns: int, copied_ns: int) -> None:
    """A batch has run: tell the traced requests in it when, and with whom."""
    if not any(piece.job.trace for piece in pieces):
        return
    jobs: dict[int, Job] = {id(piece.job): piece.job for piece in pieces}
    traces = [job.trace for job in jobs.values() if job.trace is not None]
    batch = BatchTimes(
        began_ns,
        computed_ns,
        copied_ns,
        len(pieces),
        sum(piece.prepared.cost for piece in pieces),
        len(jobs),
        [trace.parent for trace in traces[: BatchTimes.MAX_MEMBERS]],
    )
    for trace in traces:
        trace.ran(batch)
