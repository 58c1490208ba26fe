"""The bound of a worker's queue: predicted seconds of work that waits for the device, by lane.

1. A request counts from its admission until the device begins it. A token counts by the pace of its model, so the bound
   follows the device.
2. A lane takes requests while it holds less than its bound (`queue.max_wait_s`, `queue.bulk_max_wait_s`). One large
   request may overshoot the bound, but never a second one. Callers and models below their part get in beyond
   (`ipc.shares`).
3. Batches that take longer than the bound would leave the device without work between them. So tokens of one full batch
   never count as more than the bound. A model that has not run yet counts by `FIRST_TOKENS_PER_S`, and so does a model
   that ran alone only, as far as what ran allows (`Pace`).
4. Sessions divide the room: a session may use all that the others do not use, and has its equal part when they do.

How fast the device works is known by model (`Paces`), for the bound and the turns of the queue, and in all for people
who watch. A batch takes a time of its own and a time for each token, so lone queries tell little about a full batch.
`Pace` keeps both parts apart by least squares over recent batches.

A batch holds as many tokens as the budget of its model (`ModelBudgets`). The budget halves when a batch does not fit
into memory, and recovers by a quarter after every `GROW_AFTER_S` without trouble, so the budget is back at its
configured size within five minutes.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from ipc.errors import QueueFull
from ipc.settings import Queue
from ipc.shares import Held, Shares
from ipc.wire.messages import LANES
from workers.scheduling.job import Batch, Job

MEMORY_S = 2.0
"""Device time after which recent batches make up two thirds of a pace."""
MOST_WEIGHT = 0.5
"""The largest weight of one batch in a pace, however long the batch took."""
MOMENT_S = 1e-6
"""A batch that took less time changes no pace."""
OUTLIER = 4.0
"""A batch counts as at most so many times the time that was predicted."""
SPREAD = 0.1
"""Batches whose sizes differ less, as a part of their mean, do not tell the two parts apart."""
EXTRAPOLATED = 4.0
"""Before a batch was full, full batches count as at most so many times as large as the batches that ran."""
GROW_AFTER_S = 20.0
SMALLEST_TOKENS = 64
"""No token budget shrinks below this number, however often batches did not fit."""
FIRST_TOKENS_PER_S = 4000.0
"""The pace of a model that has not run yet: between those of a small and of a large model on a processor."""
FULL_AGAIN = 2.0
"""A full batch may hold so many times the tokens that full batches held lately."""
FADES = 0.8
"""At each division of the room the most that a session has used is multiplied by this factor."""


class DrainRate:
    """Tokens per second of device time, smoothed over recent batches."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """One batch of `tokens` took `seconds` of device time."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        # A large batch says more about throughput than a lone query does.
        weight = min(0.3, 0.02 + tokens / 20000)
        self.tokens_per_s += (rate - self.tokens_per_s) * (weight if self.tokens_per_s else 1.0)

    def seconds_for(self, tokens: int) -> float:
        """Predicted device time."""
        return tokens / self.tokens_per_s if self.tokens_per_s else 0.0


class Pace:
    """Device time of the batches of one model: `batch_s` for a batch, `token_s` for each token of it.

    `per_token_s` is the time for a token where batches are as full as they are under load, with `full_tokens`: fewer
    than the budget where items, turns or options bound a batch, and 0 before a batch was full. Until then the batches
    that ran only give bounds: a full batch takes at least as long as they did and holds at most the budget, and is
    `EXTRAPOLATED` times as large as they were, or more. Between the bounds `FIRST_TOKENS_PER_S` decides: a lone short
    text says nothing about a burst of long ones.
    """

    def __init__(self) -> None:
        self.batch_s = self.token_s = self.per_token_s = self.full_tokens = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._full_weight = 0.0

    def record(self, tokens: int, seconds: float, full: bool = False, budget: float = math.inf) -> None:
        """A batch of `tokens` took `seconds` of device time, of a model whose batches hold `budget` tokens at most.

        `full`: work that could not join the batch was left waiting.
        """
        if seconds < MOMENT_S or tokens <= 0:
            return
        if self._weight:
            seconds = max(MOMENT_S, min(seconds, OUTLIER * self.seconds_for(tokens)))
        weight = min(MOST_WEIGHT, seconds / MEMORY_S)
        if full:
            self._full_weight += weight * (1 - self._full_weight)
            self.full_tokens += weight / self._full_weight * (tokens - self.full_tokens)
        self._forget(1 - weight)
        self._weight += weight
        self._tokens += weight * tokens
        self._seconds += weight * seconds
        self._squares += weight * tokens * tokens
        self._products += weight * tokens * seconds
        self._fit(budget)

    def _forget(self, rest: float) -> None:
        self._weight *= rest
        self._tokens *= rest
        self._seconds *= rest
        self._squares *= rest
        self._products *= rest

    def _fit(self, budget: float) -> None:
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        self.token_s = seconds / tokens
        if spread > (SPREAD * tokens) ** 2:
            slope = (self._products / self._weight - tokens * seconds) / spread
            self.token_s = min(self.token_s, max(0.0, slope))
        self.batch_s = seconds - self.token_s * tokens
        self.per_token_s = self.token_s + self.batch_s / (self.full_tokens or EXTRAPOLATED * tokens)
        if not self.full_tokens:
            least = seconds / max(budget, tokens)
            self.per_token_s = min(self.per_token_s, max(least, 1 / FIRST_TOKENS_PER_S))

    def seconds_for(self, tokens: int) -> float:
        """Predicted device time of one batch."""
        return self.batch_s + self.token_s * tokens


class Paces:
    """The pace of each model, by its name."""

    def __init__(self, full_of: Callable[[str], float] = lambda model: math.inf) -> None:
        """`full_of` gives the tokens of a full batch of a model."""
        self._full_of = full_of
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)

    def record(self, model: str, tokens: int, seconds: float, full: bool = False) -> None:
        """See `Pace.record`."""
        self._paces[model].record(tokens, seconds, full, self._full_of(model))

    def per_token_s(self, model: str) -> float:
        """Seconds for a token in full batches; 0 for a model that has not run yet."""
        pace = self._paces.get(model)
        return pace.per_token_s if pace else 0.0

    def full_tokens(self, model: str) -> float:
        """Tokens of full batches as they were lately; 0 before the first."""
        pace = self._paces.get(model)
        return pace.full_tokens if pace else 0.0

    def tokens_per_s(self, model: str) -> float:
        """Tokens a second in full batches; 0 for a model that has not run yet."""
        seconds = self.per_token_s(model)
        return 1 / seconds if seconds else 0.0

    def seconds_for(self, model: str, tokens: int) -> float:
        """Predicted device time of one batch; 0 for a model that has not run yet."""
        pace = self._paces.get(model)
        return pace.seconds_for(tokens) if pace else 0.0

    def models(self) -> list[str]:
        """The models that have run."""
        return list(self._paces)


@dataclass(slots=True)
class LaneBound:
    """The work in one lane, in all and by session. `used_s`: the most that each session has used lately."""

    name: str
    limit_s: float
    shares: Shares = field(default_factory=Shares)
    sessions: dict[bytes, Held] = field(default_factory=dict)
    used_s: dict[bytes, float] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)

    def add(self, tokens: int, model: str, session: bytes) -> None:
        """A session has so many tokens more, or fewer, of a model."""
        held = self.sessions.setdefault(session, Held())
        held.add(tokens, model)
        if not held.tokens:
            del self.sessions[session]


class Bound:
    """The work that a worker has admitted and not begun. The lock of the queue guards the object."""

    def __init__(
        self, settings: Queue, paces: Paces, batch_tokens: int, full_of: Callable[[str], int] | None = None
    ) -> None:
        """`full_of` gives the tokens of a full batch of a model, `batch_tokens` of one whose pace is unknown."""
        self._paces, self._batch_tokens, self._floor = paces, batch_tokens, settings.min_tokens
        self._full_of = full_of or (lambda model: batch_tokens)
        limits = {"interactive": settings.max_wait_s, "bulk": settings.bulk_max_wait_s}
        self._lanes = {name: LaneBound(name, limits[name]) for name in LANES}
        self._device_until = 0.0
        """When the batch on the device is expected to be done (monotonic seconds)."""

    @property
    def floor(self) -> int:
        """Tokens of a model that all sessions together may send without asking for room."""
        return self._floor or self._batch_tokens

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return sum(lane.shares.cost for lane in self._lanes.values())

    def limit_tokens(self, tokens_per_s: float) -> int:
        """Tokens of the kind that waits now that the interactive lane holds; while nothing waits, at this rate."""
        lane = self._lanes["interactive"]
        seconds = lane.shares.all.seconds(partial(self.price, lane.limit_s))
        if seconds:
            tokens_per_s = lane.shares.cost / seconds
        return max(self.floor, int(lane.limit_s * tokens_per_s))

    def price(self, limit_s: float, model: str) -> float:
        """Seconds that a token of a model counts under a bound. Work under the name "" has a bound of its own."""
        if not model:
            return 0.0
        floor = self._floor or self._full(model)
        known = self._paces.per_token_s(model)
        if not known and not self._floor:
            known = 1 / FIRST_TOKENS_PER_S
        return min(known or math.inf, limit_s / floor)

    def _full(self, model: str) -> float:
        """Tokens of a full batch: of the budget, or fewer where full batches held fewer lately."""
        budget, seen = self._full_of(model), self._paces.full_tokens(model)
        return min(budget, FULL_AGAIN * seen) if seen else budget

    def prices(self) -> dict[str, float]:
        """Seconds that a token counts in the interactive lane, by model, for models that have run or have work here.

        Without the price of a model whose first batch still runs, a frontend would take the work of that model for
        nothing and the full queue for a limit of 0: a caller below its part would be refused.
        """
        limit_s = self._lanes["interactive"].limit_s
        waiting = {model for lane in self._lanes.values() for model in lane.shares.all.tokens if model}
        return {model: self.price(limit_s, model) for model in waiting.union(self._paces.models())}

    def drain_s(self, lane: str) -> float:
        """Seconds until the device has begun all work that waits in a lane, and the work that goes before."""
        price = self._paces.per_token_s
        before = [self._lanes["interactive"]] if lane == "interactive" else self._lanes.values()
        waiting = sum(each.shares.all.seconds(price) for each in before)
        return waiting + max(0.0, self._device_until - time.monotonic())

    def admit(self, job: Job) -> None:
        """Count a request in. Raises `QueueFull` with the time until the lane has drained."""
        work, lane = job.work, self._lanes[job.work.lane]
        model = _name(job)
        price = partial(self.price, lane.limit_s)
        if model and not lane.shares.allows(lane.limit_s, price, model, work.caller, work.share):
            lane.refused.add(job.session)
            setting = "queue.max_wait_s" if lane.name == "interactive" else "queue.bulk_max_wait_s"
            raise QueueFull(
                f"the {lane.name} lane of the queue holds {lane.shares.all.seconds(price):.1f} s of work, "
                f"its bound is {lane.limit_s:g} s ({setting})",
                retry_after_s=retry_after_s(self.drain_s(lane.name)),
            )
        self.begin(job)

    def begin(self, job: Job) -> None:
        """Count a request that is let in, or that goes on after a rest."""
        lane, model = self._lanes[job.work.lane], _name(job)
        job.counted = job.cost
        lane.shares.begin(job.counted, model, job.work.caller, job.work.share)
        lane.add(job.counted, model, job.session)

    def change(self, job: Job, tokens: int) -> None:
        """A counted request has `tokens` waiting from now on."""
        lane, model, more = self._lanes[job.work.lane], _name(job), tokens - job.counted
        if more:
            job.counted = tokens
            lane.shares.change(more, model, job.work.caller)
            lane.add(more, model, job.session)

    def end(self, job: Job) -> None:
        """A request ends, or rests."""
        lane, model = self._lanes[job.work.lane], _name(job)
        lane.shares.end(job.counted, model, job.work.caller)
        lane.add(-job.counted, model, job.session)
        job.counted = 0

    def run(self, batch: Batch) -> None:
        """The device begins a batch: its tokens wait no more. Jobs that take many turns count as before."""
        self._device_until = time.monotonic() + self._paces.seconds_for(batch.first.model, batch.tokens)
        if batch.first.strategy.in_turns:
            return
        for piece in batch.pieces:
            job = piece.job
            job.begun += piece.prepared.cost
            if job.counted:
                self.change(job, max(0, job.counted - piece.prepared.cost))

    def ran(self) -> None:
        """A batch has left the device."""
        self._device_until = 0.0

    def rooms(self, lane: str, sessions: Iterable[bytes]) -> dict[bytes, float]:
        """Seconds that each session may add to a lane; below 0 for a session that is above its part.

        Their sum exceeds the room only where sessions use less than their part. Then requests that come at the same
        time from several sessions meet the bound itself.
        """
        bound, keys = self._lanes[lane], list(sessions)
        price = partial(self.price, bound.limit_s)
        free = bound.limit_s - bound.shares.all.seconds(price)
        part = bound.limit_s / max(1, len(keys))
        held = {key: bound.sessions[key].seconds(price) if key in bound.sessions else 0.0 for key in keys}
        used = {key: max(held[key], FADES * bound.used_s.get(key, 0.0)) for key in keys}
        used |= {key: max(used[key], part) for key in keys if key in bound.refused}
        bound.used_s, bound.refused = used, set()
        claimed = {key: min(part, used[key]) for key in keys}
        others = sum(claimed.values())
        return {key: min(free, bound.limit_s - (others - claimed[key]) - held[key]) for key in keys}

    def others_s(self, session: bytes) -> float:
        """Seconds of work that other sessions have waiting."""
        seconds = 0.0
        for lane in self._lanes.values():
            price = partial(self.price, lane.limit_s)
            mine = lane.sessions.get(session)
            seconds += lane.shares.all.seconds(price) - (mine.seconds(price) if mine else 0.0)
        return seconds


def retry_after_s(drain_s: float) -> float:
    """Whole seconds, at least one, until a queue has drained."""
    return float(max(1, math.ceil(drain_s)))


def _name(job: Job) -> str:
    """The model that prices a job; "" for a job of a kind that bounds what waits itself."""
    return "" if job.strategy.bounds_itself else job.model


class TokenBudget:
    """Tokens per batch of one model."""

    def __init__(self, tokens: int) -> None:
        self.configured = self.tokens = tokens
        self._calm_since = time.monotonic()

    def shrink(self, tried: int) -> None:
        """A batch of `tried` tokens did not fit."""
        self.tokens = min(self.configured, max(SMALLEST_TOKENS, min(self.tokens, tried) // 2))
        self._calm_since = time.monotonic()

    def grow(self) -> None:
        """A batch fitted: after `GROW_AFTER_S` without trouble a quarter is added."""
        now = time.monotonic()
        if self.tokens < self.configured and now - self._calm_since > GROW_AFTER_S:
            self.tokens = min(self.configured, self.tokens + max(1, self.configured // 4))
            self._calm_since = now


class ModelBudgets:
    """One token budget per model; models that never ran out of memory have the configured one, or their own limit."""

    def __init__(self, tokens: int) -> None:
        """`tokens` is what is configured for all models."""
        self.configured = tokens
        self.limits: dict[str, int] = {}
        """Tokens of a full batch of the models that the worker offers; the table of models keeps the numbers."""
        self._by_model: dict[str, TokenBudget] = {}

    @property
    def smallest(self) -> int:
        """Tokens of the smallest budget there is."""
        return min((budget.tokens for budget in list(self._by_model.values())), default=self.configured)

    def tokens_of(self, model: str) -> int:
        """Tokens per batch of a model."""
        budget = self._by_model.get(model)
        return self.limits.get(model, self.configured) if budget is None else budget.tokens

    def shrink(self, model: str, tried: int, full: int | None = None) -> None:
        """A batch of `tried` tokens did not fit. `full` is the limit of the adapter; None: as `limits` says."""
        # NOTE: a model that is unloading has no limit any more, so `limits` would give the number for all models.
        full = self.limits.get(model, self.configured) if full is None else full
        self._by_model.setdefault(model, TokenBudget(full)).shrink(tried)

    def grow(self, model: str) -> None:
        """Called after a batch that fitted."""
        budget = self._by_model.get(model)
        if budget is not None:
            budget.grow()
            if budget.tokens >= budget.configured:
                del self._by_model[model]
