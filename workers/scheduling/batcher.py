"""Which items run next: a pure policy without clocks, threads or devices.

1. Items that may share a forward pass form a group (model, operation, options); a solo request is a group of its own.
2. A group has two lanes. Inside a lane, callers (API keys; without keys, sessions) take turns by the cost they have
   used, divided by their share (start-time fair queueing).
3. `take` chooses a group: interactive work before bulk, then the group that has used the least time of the device,
   by the pace of its model.
4. The batch fills the token budget: bulk items that have waited too long first (half of the budget at most), then
   interactive, then bulk. An item over the budget runs alone. A batch does not wait for more items, except in a group
   that gathers: its batch is taken once the oldest item has waited for the delay of the model, or once the items make
   up a preferred size.
5. A query waits for at most one batch of others. After a query of a group, batches of other groups and of the group's
   own bulk work are short for `ATTENTION_NS`: as much as the device does in `turn_s`. Bulk items never ride along with
   interactive items in two batches one after the other. A batch taken ahead lets interactive work pass once.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from workers.adapters.base import Gathering
from workers.scheduling.job import Batch, Job, Piece

MAX_AHEAD = 256
"""So many callers or groups without waiting work keep their accounts; of more, those that owe nothing lose theirs."""
ATTENTION_NS = 5_000_000_000
"""After a query the batches of other work stay short for so long."""
TURN_PARTS = 16
"""A turn is at least this part of the token budget, however slow the model is: smaller batches waste the device."""
UNKNOWN_PACE = 10_000.0
"""Tokens a second of a model that has not run yet."""

Pace = Callable[[str], float]
"""Tokens a second of a model, by its name; 0 when it has not run yet."""
Room = Callable[[str], int]
"""Most tokens of a batch of a model, by its name."""


def _unknown(model: str) -> float:
    return 0.0


@dataclass(slots=True)
class _Caller:
    """Jobs of one caller in one lane; `used` is its virtual time in tokens of a caller with share 1."""

    used: float
    jobs: deque[tuple[Job, deque[int]]] = field(default_factory=deque)


class Lane:
    """Fair queue of items over callers."""

    def __init__(self) -> None:
        self._callers: dict[Hashable, _Caller] = {}
        self._ahead: dict[Hashable, float] = {}
        self._clock = 0.0
        self.items = 0
        self.tokens = 0

    def add(self, job: Job, indices: Sequence[int]) -> None:
        """Append items of a job."""
        key = _caller_of(job)
        caller = self._callers.get(key)
        if caller is None:
            caller = self._callers[key] = _Caller(max(self._clock, self._ahead.pop(key, 0.0)))
        caller.jobs.append((job, deque(indices)))
        self.items += len(indices)
        self.tokens += sum([job.prepared[i].cost for i in indices])

    def oldest_ns(self) -> int | None:
        """Arrival of the oldest job, or None when empty."""
        return min((caller.jobs[0][0].queued_ns for caller in self._callers.values()), default=None)

    def costs(self) -> Iterator[int]:
        """Tokens of each item, in the order in which `pop` gives them."""
        used = {key: caller.used for key, caller in self._callers.items()}
        waiting = {
            key: ((job, index) for job, indices in caller.jobs for index in indices)
            for key, caller in self._callers.items()
        }
        while used:
            key = min(used, key=used.__getitem__)
            job, index = next(waiting[key], (None, 0))
            if job is None:
                del used[key]
                continue
            used[key] += job.prepared[index].cost / job.work.share
            yield job.prepared[index].cost

    def pop(self, room: int, force: bool) -> Piece | None:
        """The next item if it fits `room` tokens (or in any case when `force`), else None."""
        if not self._callers:
            return None
        if len(self._callers) == 1:
            ((key, caller),) = self._callers.items()
        else:
            key, caller = min(self._callers.items(), key=lambda entry: entry[1].used)
        job, indices = caller.jobs[0]
        prepared = job.prepared[indices[0]]
        if prepared.cost > room and not force:
            return None
        piece = Piece(job, indices.popleft(), prepared)
        self._clock = max(self._clock, caller.used)
        caller.used += prepared.cost / job.work.share
        self.items -= 1
        self.tokens -= prepared.cost
        if not indices:
            caller.jobs.popleft()
            if not caller.jobs:
                self._leave(key)
        return piece

    def remove(self, job: Job) -> int:
        """Drop the waiting items of a job; returns how many there were."""
        key = _caller_of(job)
        caller = self._callers.get(key)
        removed = 0
        for entry in list(caller.jobs) if caller else ():
            if entry[0] is job and caller is not None:
                caller.jobs.remove(entry)
                removed += len(entry[1])
                self.tokens -= sum(job.prepared[i].cost for i in entry[1])
        self.items -= removed
        if caller is not None and not caller.jobs:
            self._leave(key)
        return removed

    def _leave(self, key: Hashable) -> None:
        """Forget a caller without waiting jobs, but for the cost used ahead of others: leaving earns no turn."""
        used = self._callers.pop(key).used
        if used > self._clock:
            self._ahead[key] = used
        if len(self._ahead) > MAX_AHEAD:
            self._ahead = {key: used for key, used in self._ahead.items() if used > self._clock}

    def jobs(self) -> Iterator[Job]:
        """Every waiting job."""
        for caller in self._callers.values():
            yield from (job for job, _ in caller.jobs)


def _caller_of(job: Job) -> Hashable:
    return job.work.caller or job.session


def _group_key(job: Job) -> Hashable:
    return (job.group, id(job)) if job.solo else (job.group, None)


class _Group:
    """Items of one model that may share a batch; `used` is device time in seconds."""

    def __init__(self, first: Job, used: float) -> None:
        """`first` is a job of the group. The limits of batches of its adapter hold for all jobs of the group."""
        self.model, self.used, self.adapter = first.model, used, first.adapter
        self._gathering: Gathering | None = None if first.solo else first.adapter.gathering
        self._batch_tokens: int | None = first.adapter.batch_tokens
        self.lanes = {"interactive": Lane(), "bulk": Lane()}

    @property
    def items(self) -> int:
        return self.lanes["interactive"].items + self.lanes["bulk"].items

    @property
    def tokens(self) -> int:
        return self.lanes["interactive"].tokens + self.lanes["bulk"].tokens

    def due_ns(self) -> int:
        """The instant at which a batch of the group may be taken, in nanoseconds; 0 is now."""
        gathering = self._gathering
        if gathering is None or not gathering.delay_ns or self.tokens >= gathering.full_tokens:
            return 0
        return 0 if self._preferred(gathering) else self._oldest_ns() + gathering.delay_ns

    def most(self, max_tokens: int, now_ns: int) -> int:
        """Most tokens of a batch."""
        # NOTE: the limit is looked up by name. The model may have been replaced since.
        most = max_tokens if self._batch_tokens is None else min(max_tokens, self._batch_tokens)
        gathering = self._gathering
        if gathering is None or (gathering.delay_ns and self._oldest_ns() + gathering.delay_ns <= now_ns):
            return most
        return min(most, self._preferred(gathering, most) or gathering.full_tokens)

    def _oldest_ns(self) -> int:
        arrivals = [at for lane in self.lanes.values() if (at := lane.oldest_ns()) is not None]
        return min(arrivals, default=0)

    def _preferred(self, gathering: Gathering, most: int | None = None) -> int:
        """The largest preferred size, up to `most`, that the next items make up exactly; 0 when there is none."""
        if not gathering.preferred or self.tokens < gathering.preferred[0]:
            return 0
        limit = gathering.full_tokens if most is None else min(most, gathering.full_tokens)
        largest = total = 0
        for cost in itertools.chain(self.lanes["interactive"].costs(), self.lanes["bulk"].costs()):
            total += cost
            if total > limit:
                break
            if total in gathering.preferred:
                largest = total
        return largest


class Batcher:
    """The prepared items of one worker that wait for the device, by model and lane."""

    def __init__(self, starve_after_ns: int = 2_000_000_000, turn_s: float = 0.0) -> None:
        """`turn_s` is the predicted time of a batch while others wait or will soon; 0 = batches are always filled."""
        self._groups: dict[Hashable, _Group] = {}
        self._ahead: dict[Hashable, float] = {}
        self._clock = 0.0
        self._starve_after_ns, self._turn_s = starve_after_ns, turn_s
        self._asked_ns: dict[Hashable, int] = {}
        self._bulk_ran = False
        self._last: tuple[Hashable, float] = (None, 0.0)
        self._suspended: dict[int, Batch] = {}
        """Batches that made way for other work, by the identity of their adapter."""
        self.items = self.tokens = 0
        """Items and tokens that wait."""

    def add(self, job: Job, start: int, stop: int) -> None:
        """Take in the prepared items `start` to `stop` of a job, but those that failed alone."""
        ready = [index for index in range(start, stop) if index not in job.errors]
        if not ready:
            return
        key = _group_key(job)
        if key not in self._groups:
            used = max(self._clock, self._account(job, 0.0))
            self._groups[key] = _Group(job, used)
            self._ahead.pop(key, None)
        lane = self._groups[key].lanes[job.work.lane]
        before = lane.tokens
        lane.add(job, ready)
        self.items += len(ready)
        self.tokens += lane.tokens - before
        if job.work.lane == "interactive":
            self._asked_ns[key] = job.queued_ns

    def remove(self, job: Job) -> int:
        """Drop the waiting items of a job; returns their number."""
        removed = 0
        for key, group in list(self._groups.items()):
            lane = group.lanes[job.work.lane]
            before = lane.tokens
            removed += lane.remove(job)
            self.tokens -= before - lane.tokens
            if not group.items:
                self._leave(key, (job.group, None))
        self.items -= removed
        return removed

    def take(
        self,
        max_tokens: int,
        max_items: int,
        now_ns: int,
        pace: Pace = _unknown,
        room: Room | None = None,
    ) -> list[Piece]:
        """The next batch, at most `max_items` and (unless it is one item) `max_tokens`; empty when nothing is due.

        `room` is what a batch of a model may hold instead.
        """
        due = self._due(now_ns)
        if not due:
            return []
        key = due[0]
        if len(due) > 1:
            key = min(due, key=lambda k: self._urgency(self._groups[k], now_ns))
        group = self._groups[key]
        self._clock, self._last = max(self._clock, group.used), (key, group.used)
        tokens_per_s = pace(group.model) or UNKNOWN_PACE
        if room is not None:
            max_tokens = room(group.model)
        most, most_with_bulk = self._limits(key, group.most(max_tokens, now_ns), tokens_per_s, now_ns)
        pieces = self._pieces(group, most, most_with_bulk, max_items, now_ns)
        self._bulk_ran = any(piece.job.work.lane == "bulk" for piece in pieces)
        self._taken(key, pieces, tokens_per_s)
        return pieces

    def _taken(self, key: Hashable, pieces: list[Piece], tokens_per_s: float) -> None:
        """Count what a batch takes, and charge its group."""
        group, tokens = self._groups[key], sum([piece.prepared.cost for piece in pieces])
        self.items -= len(pieces)
        self.tokens -= tokens
        group.used += tokens / tokens_per_s
        if not group.items:
            self._leave(key, (pieces[0].job.group, None))

    def due_ns(self) -> int | None:
        """When the next batch may be taken (0 is now); None when nothing waits."""
        if self._suspended:
            return 0
        first = None
        for group in self._groups.values():
            due = group.due_ns()
            if not due:
                return 0
            first = due if first is None else min(first, due)
        return first

    def due_tokens(self, now_ns: int) -> int:
        """Tokens of all groups of which a batch may be taken now."""
        return sum(self._groups[key].tokens for key in self._due(now_ns))

    def _due(self, now_ns: int) -> list[Hashable]:
        """Groups of which a batch may be taken now."""
        held = self._suspended
        return [
            key
            for key, group in self._groups.items()
            if group.due_ns() <= now_ns and not (held and id(group.adapter) in held)
        ]

    def holds_work(self, model: str) -> bool:
        """Whether work of a model waits."""
        return any(group.model == model for group in self._groups.values())

    @property
    def suspended(self) -> bool:
        """Whether a batch is suspended."""
        return bool(self._suspended)

    def holds(self, adapter: object) -> bool:
        """Whether a batch of this adapter is suspended."""
        return id(adapter) in self._suspended

    def suspend(self, batch: Batch) -> None:
        """A batch made way for other work: nothing else of its adapter runs before it has gone on."""
        self._suspended[id(batch.first.adapter)] = batch

    def any_suspended(self) -> Batch | None:
        """A suspended batch, which goes on now whatever waits; None if no batch is suspended."""
        return self._suspended.pop(next(iter(self._suspended))) if self._suspended else None

    def resume(self, now_ns: int, ahead: Batch | None) -> Batch | None:
        """The suspended batch that comes first, unless waiting work or the batch `ahead` comes before it."""
        if not self._suspended:
            return None
        place, _, batch = min(
            (self._place(each, now_ns), at, each) for at, each in enumerate(self._suspended.values())
        )
        rivals = [self._urgency(self._groups[key], now_ns) for key in self._due(now_ns)]
        if ahead is not None and not self.holds(ahead.first.adapter):
            # NOTE: the batch ahead goes before bulk work that waits, but queries may pass the batch ahead.
            rivals = [rival for rival in rivals if not rival[0]]
            rivals += [(piece.job.work.lane == "bulk", self._last[1]) for piece in ahead.pieces]
        if any(rival <= place for rival in rivals):
            return None
        self._clock = max(self._clock, place[1])
        return self._suspended.pop(id(batch.first.adapter))

    def _place(self, batch: Batch, now_ns: int) -> tuple[bool, float]:
        """The urgency of a suspended batch, comparable with `_urgency`.

        Bulk work that has waited too long counts as a query, and so does bulk work that keeps a query of the same
        adapter from the device: both would wait for ever while queries of other models keep coming. A batch that
        nobody waits for comes before everything: its next step ends it, and gives back its memory.
        """
        adapter, jobs = batch.first.adapter, [piece.job for piece in batch.pieces]
        if not any(job.state == "open" for job in jobs):
            return False, -math.inf
        waits_for_turn = (
            all(job.work.lane == "bulk" for job in jobs)
            and now_ns - min(job.queued_ns for job in jobs) <= self._starve_after_ns
            and not any(
                group.adapter is adapter and group.lanes["interactive"].items
                for group in self._groups.values()
            )
        )
        return waits_for_turn, self._used(batch)

    def others_wait(self, adapter: object, now_ns: int) -> bool:
        """Whether work of another adapter is due, or suspended."""
        return bool(self._suspended) or any(
            self._groups[key].adapter is not adapter for key in self._due(now_ns)
        )

    def _used(self, batch: Batch) -> float:
        """Device time of the group of a batch."""
        group = self._groups.get(_group_key(batch.first))
        return self._account(batch.first, self._clock) if group is None else group.used

    def _account(self, job: Job, otherwise: float) -> float:
        """Device time in the account of a job's group, which solo requests share; `otherwise` if nothing is owed.

        A solo request is a group for one batch only, so its time is charged here.
        """
        key = job.group, None
        group = self._groups.get(key)
        return self._ahead.get(key, otherwise) if group is None else group.used

    def settle(self, job: Job, seconds: float) -> None:
        """A batch with this job took `seconds` more (or less) of the device than was predicted."""
        account = job.group, None
        group = self._groups.get(_group_key(job)) or self._groups.get(account)
        if group is not None:
            group.used += seconds
        elif (used := self._ahead.pop(account, self._clock) + seconds) > self._clock:
            self._ahead[account] = used

    def _leave(self, key: Hashable, account: Hashable) -> None:
        """Forget a group without waiting items. The time used ahead of the other groups stays in its account."""
        used = self._groups.pop(key).used
        if account in self._groups:
            self._groups[account].used = max(self._groups[account].used, used)
        elif used > self._clock:
            self._ahead[account] = max(self._ahead.get(account, 0.0), used)
        if len(self._ahead) > MAX_AHEAD:
            self._ahead = {key: used for key, used in self._ahead.items() if used > self._clock}

    def _limits(self, key: Hashable, max_tokens: int, tokens_per_s: float, now_ns: int) -> tuple[int, int]:
        """Most tokens of a batch of this group, without and with bulk items."""
        self._asked_ns = {k: at for k, at in self._asked_ns.items() if now_ns - at < ATTENTION_NS}
        if not self._turn_s or not self._asked_ns:
            return max_tokens, max_tokens
        turn = min(max_tokens, max(max_tokens // TURN_PARTS, int(self._turn_s * tokens_per_s)))
        return (max_tokens if self._asked_ns.keys() <= {key} else turn), turn

    def _pieces(
        self, group: _Group, most: int, most_with_bulk: int, max_items: int, now_ns: int
    ) -> list[Piece]:
        pieces: list[Piece] = []
        interactive, bulk = group.lanes["interactive"], group.lanes["bulk"]
        bulk_rides = not (interactive.items and self._bulk_ran)
        if not bulk.items:
            self._fill(pieces, interactive, most, max_items)
            return pieces
        if bulk_rides and self._starving(bulk, now_ns):
            self._fill(pieces, bulk, most_with_bulk // 2, max(1, max_items // 2))
        self._fill(pieces, interactive, most_with_bulk if pieces else most, max_items)
        if bulk_rides:
            self._fill(pieces, bulk, most_with_bulk, max_items)
        return pieces

    def overtakes(self, pieces: Sequence[Piece]) -> bool:
        """Whether interactive work that waits should run before `pieces`, the batch that was taken last."""
        waiting = {key: group for key, group in self._groups.items() if group.lanes["interactive"].items}
        if all(piece.job.work.lane == "bulk" for piece in pieces):
            return bool(waiting)
        taken, used = self._last
        return any(group.used <= used for key, group in waiting.items() if key != taken)

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
        room = max_tokens - sum([piece.prepared.cost for piece in pieces]) if pieces else max_tokens
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
