"""Which items run next: a pure policy without clocks, threads or devices.

1. Items that may share a forward pass form a group (model, operation, options); a solo request is a group of its own.
2. A group has two lanes. Inside a lane, callers take turns by the cost they have used (start-time fair queueing).
3. `take` chooses a group: interactive work before bulk, then the group that has used the least cost.
4. It fills the token budget: bulk items that have waited too long first (half of the budget at most), then
   interactive, then bulk. An item over the budget runs alone. There is no timer: what is there is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from workers.job import Job, Piece


@dataclass(slots=True)
class _Caller:
    """Jobs of one caller in one lane; `used` is its virtual time in tokens."""

    used: float = 0.0
    jobs: deque[tuple[Job, deque[int]]] = field(default_factory=deque)


class Lane:
    """Fair queue of items over callers."""

    def __init__(self) -> None:
        self._callers: dict[Hashable, _Caller] = {}
        self._clock = 0.0
        self.items = 0
        self.tokens = 0

    def add(self, job: Job, indices: Sequence[int]) -> None:
        """Append items of a job."""
        caller = self._callers.get(job.session)
        if caller is None:
            caller = self._callers[job.session] = _Caller(self._clock)
        caller.jobs.append((job, deque(indices)))
        self.items += len(indices)
        self.tokens += sum(job.prepared[i].cost for i in indices)

    def oldest_ns(self) -> int | None:
        """Arrival of the oldest job, or None when empty."""
        return min((caller.jobs[0][0].queued_ns for caller in self._callers.values()), default=None)

    def pop(self, room: int, force: bool) -> Piece | None:
        """The next item if it fits `room` tokens (or in any case when `force`), else None."""
        if not self._callers:
            return None
        key, caller = min(self._callers.items(), key=lambda entry: entry[1].used)
        job, indices = caller.jobs[0]
        prepared = job.prepared[indices[0]]
        if prepared.cost > room and not force:
            return None
        piece = Piece(job, indices.popleft(), prepared)
        self._clock = max(self._clock, caller.used)
        caller.used += prepared.cost
        self.items -= 1
        self.tokens -= prepared.cost
        if not indices:
            caller.jobs.popleft()
            if not caller.jobs:
                del self._callers[key]
        return piece

    def remove(self, job: Job) -> int:
        """Drop the waiting items of a job; returns how many there were."""
        caller = self._callers.get(job.session)
        removed = 0
        for entry in list(caller.jobs) if caller else ():
            if entry[0] is job and caller is not None:
                caller.jobs.remove(entry)
                removed += len(entry[1])
                self.tokens -= sum(job.prepared[i].cost for i in entry[1])
        self.items -= removed
        if caller is not None and not caller.jobs:
            del self._callers[job.session]
        return removed

    def jobs(self) -> Iterator[Job]:
        """Every waiting job."""
        for caller in self._callers.values():
            yield from (job for job, _ in caller.jobs)


class _Group:
    """Items that may share a batch."""

    def __init__(self, used: float) -> None:
        self.used = used
        self.lanes = {"interactive": Lane(), "bulk": Lane()}

    @property
    def items(self) -> int:
        return sum(lane.items for lane in self.lanes.values())


class Batcher:
    """All waiting items of one worker."""

    def __init__(self, starve_after_ns: int = 2_000_000_000) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self._clock = 0.0
        self._starve_after_ns = starve_after_ns

    @property
    def items(self) -> int:
        """Items waiting."""
        return sum(group.items for group in self._groups.values())

    @property
    def tokens(self) -> int:
        """Tokens waiting."""
        return sum(lane.tokens for group in self._groups.values() for lane in group.lanes.values())

    def add(self, job: Job, start: int, stop: int) -> None:
        """Take in the prepared items `start` to `stop` of a job, but those that failed alone."""
        ready = [index for index in range(start, stop) if index not in job.errors]
        if not ready:
            return
        key = (job.group, id(job)) if job.solo else (job.group, None)
        if key not in self._groups:
            self._groups[key] = _Group(self._clock)
        self._groups[key].lanes[job.lane].add(job, ready)

    def remove(self, job: Job) -> int:
        """Drop what is still waiting of a job; returns the number of items."""
        removed = 0
        for key, group in list(self._groups.items()):
            removed += group.lanes[job.lane].remove(job)
            if not group.items:
                del self._groups[key]
        return removed

    def take(self, max_tokens: int, max_items: int, now_ns: int) -> list[Piece]:
        """The next batch, at most `max_items` and (unless it is one item) `max_tokens`; empty when nothing waits."""
        if not self._groups:
            return []
        key = min(self._groups, key=lambda k: self._urgency(self._groups[k], now_ns))
        group = self._groups[key]
        self._clock = max(self._clock, group.used)
        pieces: list[Piece] = []
        bulk = group.lanes["bulk"]
        if self._starving(bulk, now_ns):
            self._fill(pieces, bulk, max_tokens // 2, max(1, max_items // 2))
        for lane in (group.lanes["interactive"], bulk):
            self._fill(pieces, lane, max_tokens, max_items)
        group.used += sum(piece.prepared.cost for piece in pieces)
        if not group.items:
            del self._groups[key]
        return pieces

    def _urgency(self, group: _Group, now_ns: int) -> tuple[bool, float]:
        waits_for_turn = not group.lanes["interactive"].items and not self._starving(
            group.lanes["bulk"], now_ns
        )
        return waits_for_turn, group.used

    def _starving(self, lane: Lane, now_ns: int) -> bool:
        oldest = lane.oldest_ns()
        return oldest is not None and now_ns - oldest > self._starve_after_ns

    @staticmethod
    def _fill(pieces: list[Piece], lane: Lane, max_tokens: int, max_items: int) -> None:
        room = max_tokens - sum(piece.prepared.cost for piece in pieces)
        while len(pieces) < max_items and (piece := lane.pop(room, force=not pieces)) is not None:
            pieces.append(piece)
            room -= piece.prepared.cost

    def lanes(self) -> Iterator[tuple[str, str, Lane]]:
        """(model, lane name, lane) of every group, for metrics."""
        for group in self._groups.values():
            for name, lane in group.lanes.items():
                for job in lane.jobs():
                    yield job.model, name, lane
                    break
