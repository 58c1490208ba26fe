"""What follows an error of a worker (`Retries`).

`Retries` chooses the next action for a request that was sent to a worker:

| error | next |
|---|---|
| `Draining` | take no more from this worker, choose another |
| `ModelLoading`, `ModelNotLoaded` | the model left on the way: wait for the worker's new state |
| `LoraLoading` | wait until the worker has the adapter, for `limits.load_wait_s` at most |
| `QueueFull` | choose a worker with room; none: the answer, but a request that was lost before waits |
| `WorkerLost` | run again, within bounds; the second death on an input makes the input poison |
| `WorkerLost`, not sent | wait a moment for news of the worker; the request has lost nothing |
| every other error | is the answer |

Requests of a sequence follow the second table: only their own worker will do, and its loss is the end of the sequence.

A text that has begun goes on at a worker that has the same model (`Attempts.go_on`), by the same rule with two
differences. Text shares the device, so a death proves something only if the text was alone. And a text that has gone
beyond the place of a death is no suspect of that death any more; `generation.continuations` bounds how often a text
goes on. An input that was suspect before its request came is not carried on.

A request that was on the device when the worker died is a suspect and may run once more, alone, within the budget. A
bystander was only queued there. Its losses are no attempts and take nothing from the budget, since nothing ran for the
request and one death makes bystanders of all waiting requests. `MAX_LOSSES` and the deadline bound its losses.

Requests that may run twice are suspect for the time of their own retry only. Rows of the `PoisonList` are for requests
that are not run again: those of sequences and streams, those whose callers left before the death or that have no time
left, and poison. Inputs that are known as suspect run alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from frontend.engine.interface import Payload, bytes_of
from frontend.engine.local import routing
from frontend.engine.local.channel import Channel
from frontend.engine.local.routing import Workers
from frontend.engine.poison import PoisonList
from ipc import deadline
from ipc.errors import (
    Draining,
    LoraLoading,
    ModelLoading,
    ModelNotLoaded,
    PenstockError,
    QueueFull,
    SequenceLost,
    WorkerCrashed,
    WorkerLost,
)
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall, Work

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
MAX_LOSSES = 5
BUDGET_RATIO = 0.2
BUDGET_FLOOR = 512
BUDGET_WINDOW_S = 10.0
NEWS_S = 0.05
"""A worker's new state or credit follows its refusal within about this time."""


class RetryBudget:
    """Second runs may be at most a fifth of recent traffic (and always `BUDGET_FLOOR` per window)."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._retries: deque[float] = deque()
        self._since = time.monotonic()

    def count_request(self) -> None:
        """One request came in."""
        now = time.monotonic()
        if now - self._since > BUDGET_WINDOW_S:
            self._requests, self._since = self._requests / 2, now
        self._requests += 1

    def take(self) -> bool:
        """Take one retry out of the budget, or return False if the budget is used up."""
        now = time.monotonic()
        while self._retries and now - self._retries[0] > BUDGET_WINDOW_S:
            self._retries.popleft()
        if len(self._retries) >= max(BUDGET_FLOOR, self._requests * BUDGET_RATIO):
            return False
        self._retries.append(now)
        return True


class Attempts:
    """History of one request: how often it ran on a device that died, and how often it was merely lost."""

    def __init__(
        self, work: Work, payload: Payload = None, *, suspect: bool = False, accused: bool = False
    ) -> None:
        """`suspect`: a worker died on this input before, in another request; `accused`: more than one."""
        self.work, self.payload, self.suspect, self.accused = work, payload, suspect, accused
        # NOTE: text runs in the company of others, so that a death under a suspect text proves nothing yet.
        self.runs = 1 if suspect and not isinstance(work.call, GenerateCall) else 0
        self.losses = self.continued = 0
        self.avoid: set[int] = set()
        self.adapter_until_ns = 0
        self.most_continued = 0
        self.identity: str | None = None
        """Of the model that has begun the answer; None while nothing has arrived."""

    @property
    def solo(self) -> bool:
        """Whether the next attempt must run in a batch of its own."""
        return self.runs > 0 or self.suspect

    def go_on(self, identity: str, most: int, *, has_passed: bool) -> None:
        """The next run goes on with a text that the model with this identity has begun, `most` times after deaths.

        `has_passed`: the text has gone beyond the place at which the worker before died.
        """
        self.identity, self.most_continued = identity, most
        if has_passed:
            self.runs = 0
        # The device had begun in time, so the request may wait once more: for a turn, and for its LoRA adapter.
        self.work = msgspec.structs.replace(self.work, start_by_ns=0)
        self.adapter_until_ns = 0

    def take_up(self, identity: str, most: int, continued: int) -> None:
        """Another frontend has begun the text, which has gone on `continued` times; see `go_on`."""
        self.identity, self.most_continued, self.continued = identity, most, continued

    def suits(self, channel: Channel) -> bool:
        """Whether a worker does not have another model under the name; a text is one of one model."""
        status = None if self.identity is None else channel.models.get(self.work.model)
        return status is None or status.state != "loaded" or status.identity == self.identity

    def next_error(self, error: WorkerLost, slot: int, budget: RetryBudget) -> PenstockError | None:
        """Record a loss on `slot`; None means try again, otherwise the error to give to the caller."""
        has_begun = self.identity is not None
        self.losses += 1
        if error.suspect:
            self.runs += 1
            self.continued += has_begun
            # The device had begun in time, so the request may wait for a turn once more.
            self.work = msgspec.structs.replace(self.work, start_by_ns=0)
        if self.runs >= MAX_ATTEMPTS and (error.alone or not has_begun):
            return WorkerCrashed("the worker process died twice on this input; it is refused for a while")
        self.accused |= self.runs >= MAX_ATTEMPTS
        self.avoid = {slot}
        over = self.losses > MAX_LOSSES or time.monotonic_ns() >= self.work.deadline_ns
        over |= error.suspect and has_begun and (self.suspect or self.continued > self.most_continued)
        if over or (error.suspect and not budget.take()):
            return WorkerLost(
                "the worker was lost and the request could not be tried again",
                retry_after_s=error.retry_after_s,
            )
        return None


class Retries:
    """The rule of one frontend."""

    def __init__(
        self, workers: Workers, limits: Limits, poison: PoisonList, on_retry: Callable[[str], None]
    ) -> None:
        self._workers, self._limits, self._poison, self._on_retry = workers, limits, poison, on_retry
        self._budget = RetryBudget()

    def begin(self, work: Work, payload: Payload) -> Attempts:
        """A request came in. Raises `InputRefused` for an input that crashed workers before."""
        suspect = accused = False
        if self._poison:
            raw = bytes_of(payload)
            self._poison.check(work.model, work.call, raw)
            suspect = self._poison.is_suspect(work.model, work.call, raw)
            accused = suspect and self._poison.is_accused(work.model, work.call, raw)
        self._budget.count_request()
        return Attempts(work, payload, suspect=suspect, accused=accused)

    async def again(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        """Do the next action after an error of a worker; false if the error is the answer to the caller.

        Raises the error that the caller gets in its place.
        """
        table = NEXT if attempts.work.step is None else NEXT_IN_SEQUENCE
        action = table.get(type(error))
        return action is not None and await action(self, attempts, channel, error)

    def suspect(self, attempts: Attempts, *, alone: bool = True) -> None:
        """A worker died on a request that does not run again; `alone`: no other was on the device with the request."""
        work, raw = attempts.work, bytes_of(attempts.payload)
        if alone and attempts.runs:
            self._poison.add(work.model, work.call, raw)
        else:
            self._poison.suspect(work.model, work.call, raw, alone=alone)

    def suspect_input(self, work: Work, payload: Payload, alone: bool) -> None:
        """A worker died on a request that nobody waits for any more, or that has no time for another run."""
        self._poison.suspect(work.model, work.call, bytes_of(payload), alone=alone)

    async def _leave(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        channel.leave()
        return True

    async def _await_state(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        await asyncio.sleep(NEWS_S)
        return True

    async def _await_adapter(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        """Wait while a worker loads the LoRA adapter of a request, if there is time left to ask again."""
        work = attempts.work
        attempts.adapter_until_ns = attempts.adapter_until_ns or deadline.after(self._limits.load_wait_s)
        until_ns = min(attempts.adapter_until_ns, work.waits_until_ns)
        await asyncio.sleep(min(NEWS_S, max(0.0, deadline.remaining_s(until_ns))))
        while (left_s := deadline.remaining_s(until_ns)) > 0:
            status = channel.models.get(work.model)
            if status is None or status.loras.get(work.call.lora) != "loading":
                return True
            await self._workers.change(left_s)
        return False

    async def _seek_room(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        attempts.avoid.add(channel.slot)
        slots = {each.slot for each in routing.loaded(self._workers.channels, attempts.work.model)}
        if slots <= attempts.avoid:
            if not attempts.losses:
                return False
            attempts.avoid.clear()
            await asyncio.sleep(NEWS_S)
        return True

    async def _run_again(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        assert isinstance(error, WorkerLost)
        if not error.sent:
            # NOTE: the kernel closes the socket of a dying process before it says that the process has died. Until then
            # the channel looks ready, and a request that only tried to leave would use up its losses within one moment.
            attempts.avoid = {channel.slot}
            await self._workers.change(NEWS_S)
            return True
        final = attempts.next_error(error, channel.slot, self._budget)
        work = attempts.work
        if isinstance(final, WorkerCrashed):
            self._poison.add(work.model, work.call, bytes_of(attempts.payload))
        elif final is not None and error.suspect:
            self.suspect_input(work, attempts.payload, error.alone)
        if final is not None:
            raise final from error
        self._on_retry("suspect" if error.suspect else "bystander")
        return True

    async def _end_sequence(self, attempts: Attempts, channel: Channel, error: PenstockError) -> bool:
        assert isinstance(error, WorkerLost) and attempts.work.step is not None
        if error.suspect:
            self.suspect(attempts, alone=attempts.suspect)
        raise SequenceLost.of(attempts.work.step.id) from error


Action = Callable[[Retries, Attempts, Channel, PenstockError], Awaitable[bool]]

NEXT: dict[type[PenstockError], Action] = {
    Draining: Retries._leave,
    ModelLoading: Retries._await_state,
    ModelNotLoaded: Retries._await_state,
    LoraLoading: Retries._await_adapter,
    QueueFull: Retries._seek_room,
    WorkerLost: Retries._run_again,
}
NEXT_IN_SEQUENCE = {
    **{error: action for error, action in NEXT.items() if error is not QueueFull},
    WorkerLost: Retries._end_sequence,
}
