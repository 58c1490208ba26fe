"""What the device thread does now, and the steps of a long computation: a text written token by token, read in parts.

Each step tells the watchdog that the thread lives, so that its limit holds for a step and not for the whole, asks which
items nobody waits for any more, and may make way for other work. Outside of a batch (the proof at load) steps do
nothing. A preparing thread has steps too, so that long work on one item can end when nobody waits for the item.

A batch runs in a greenlet (`Turn`): in the middle of a computation it gives the device thread back, and goes on from
there later. So a running batch is never entered by another one, and model code need not know of it.

`Activity` knows whether a step lasts so long that the thread counts as hung. A step that runs is not a hang: any step
may take `worker.hang_timeout_s`, however short the steps of its model were before. A step that nobody waits for that
long may take as long as its last request, but `LEAST_STEP_S` in any case, so that no client ends a worker with a short
deadline. Five times the time predicted for a batch only lengthens its limit; a model that has not run yet gets ten
seconds as its prediction, and more for what is long. A step of a batch in several, the first too where parts are known
beforehand, gets its share of that limit, but never less than any step.

A process that is stopped or stuck is noticed elsewhere: it sends no heartbeats (`workers.supervisor.slots`). The
unexpected end of a vital thread ends the process: a worker without it would look alive and answer nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import greenlet
import torch

from ipc import logs
from ipc.errors import DeadlineExceeded
from workers.foreign import TurnEnded

log = logging.getLogger(__name__)

EXIT_BUG = 70

PREDICTION_FACTOR = 5.0
UNKNOWN_S = 10.0
UNKNOWN_TOKENS_PER_S = 200.0
"""The pace that limits assume for a model without a known pace: a slow model on a slow processor."""
LEAST_STEP_S = 20.0
T = TypeVar("T")


def batch_limit_s(
    hang_timeout_s: float, predicted_s: float, tokens: int = 0, awaited_s: float = math.inf
) -> float:
    """Seconds that a batch of `tokens` may take; `predicted_s` is 0 when nothing is known.

    `awaited_s` is the time until the last deadline of its requests.
    """
    unknown_s = max(UNKNOWN_S, tokens / UNKNOWN_TOKENS_PER_S)
    longest_s = min(hang_timeout_s, max(LEAST_STEP_S, awaited_s))
    return max(longest_s, PREDICTION_FACTOR * (predicted_s or unknown_s))


class Activity:
    """What the device thread does and for how long. The device thread writes, the endpoint's thread reads."""

    def __init__(self, floor_s: float = 0.0) -> None:
        """No limit of a step is below `floor_s`."""
        self._since = 0.0
        self._limit_s = self._step_limit_s = 0.0
        self._excused = 0.0, 0.0
        """The begin of a step, and seconds that do not count for its limit."""
        self._least_s = max(LEAST_STEP_S, floor_s)

    @property
    def busy(self) -> bool:
        """Whether the device thread runs a batch, a call or a step now."""
        return bool(self._since)

    @property
    def limit_s(self) -> float:
        """Seconds that the present work may take, or that the last work could take."""
        return self._limit_s

    @property
    def running_s(self) -> float:
        """Seconds since the present step began; 0 when nothing runs."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def begin(self, limit_s: float) -> None:
        """Note the begin of work that may take `limit_s` seconds."""
        self._limit_s = self._step_limit_s = limit_s
        self._since = time.monotonic()

    def renew(self, share: float = 1.0) -> None:
        """A step of the present work is done. The next step is `share` of the whole, and its limit counts from now."""
        if self._since:
            self._step_limit_s = min(self._limit_s, max(self._least_s, share * self._limit_s))
            self._since = time.monotonic()

    def end(self) -> None:
        """Note the end of the present work."""
        self._since = 0.0

    def overdue(self, unseen_s: float = 0.0) -> bool:
        """Whether the present step is past its limit. The look before was `unseen_s` ago.

        NOTE: no thread looks while the whole process stands still, since the machine is busy or asleep, and the device
        thread stands still with the process. So the time between two looks counts for half of the limit at most.
        """
        since, limit_s = self._since, self._step_limit_s
        step, excused_s = self._excused
        running_s = time.monotonic() - since if since else 0.0
        excused_s = max(0.0, min(unseen_s, running_s) - limit_s / 2) + (excused_s if step == since else 0.0)
        self._excused = since, excused_s
        return running_s - excused_s > limit_s


def vital_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """A daemon thread (not started) that runs `body`; anything that escapes it ends the process with code 70."""

    def run() -> None:
        try:
            body()
        except BaseException:
            log.critical("the %s thread failed; this process ends", name, exc_info=True)
            logs.flush()
            os._exit(EXIT_BUG)

    return threading.Thread(target=run, name=name, daemon=True)


class Item(Protocol):
    """One item of a batch."""

    @property
    def job(self) -> Any:
        """The request of the item: its `state` is `open` while somebody waits, its `work` has the deadline."""


class Deserted(DeadlineExceeded):
    """Nobody waits for any item of the batch."""


class Steps:
    """The steps of one batch."""

    def __init__(
        self,
        activity: Activity | None = None,
        pieces: Sequence[Item] = (),
        make_way: Callable[[], None] | None = None,
    ) -> None:
        self._activity, self._pieces, self._make_way = activity, pieces, make_way

    def step(self, share: float = 1.0) -> None:
        """One more step is done, and the next, `share` of the batch, has not begun: the device is free for a moment."""
        if self._make_way is not None:
            self._make_way()
        self.begin(share)

    def begin(self, share: float) -> None:
        """A step, `share` of the batch, begins."""
        if self._activity is not None:
            self._activity.renew(share)

    @property
    def deserted(self) -> bool:
        """Whether nobody waits for any item of the batch."""
        return bool(self._pieces) and all(self.abandoned(place) for place in range(len(self._pieces)))

    def abandoned(self, place: int) -> bool:
        """Whether the item at this place of the batch is wanted no more: cancelled, failed, or past its deadline."""
        if place >= len(self._pieces):
            return False
        job = self._pieces[place].job
        return bool(job.state != "open") or time.monotonic_ns() >= job.work.deadline_ns


class Turn(greenlet.greenlet):  # type: ignore[misc]
    """Runs batches, each of which can leave the device thread between two of its steps.

    `switch(batch)` begins a batch or goes on with it. Once `done` is true, `switch` has given what the strategy
    returned, and the next batch may begin.
    """

    steps: Steps | None = None
    done = True

    def __init__(
        self, make_way: Callable[[], None] = lambda: None, free_memory: Callable[[], bool] = lambda: False
    ) -> None:
        """`make_way` is called between two steps of a batch and may `leave`.

        `free_memory` lets other suspended batches end; whether there were any.
        """
        super().__init__()
        self.make_way, self.free_memory = make_way, free_memory
        # NOTE: a greenlet keeps the arguments of its first switch for its whole life, so a batch may not be among them.
        self.switch()

    def run(self) -> None:
        """One batch after the other."""
        # PERF: a new greenlet costs 8 us, a switch to an existing one less than 1 us.
        ran = None
        with contextlib.suppress(TurnEnded):
            while True:
                batch = self.parent.switch(ran)
                ran = batch.first.strategy.run(batch)
                del batch
                self.done = True

    def leave(self) -> None:
        """In the middle of a batch: give the device thread back until the next `switch`."""
        try:
            self.parent.switch()
        except greenlet.GreenletExit as end:
            # NOTE: code of models may raise the same, which is an error of the batch and no end of the turn.
            raise TurnEnded from end


_OUTSIDE = Steps()


def current() -> Steps:
    """The steps of the batch that runs now."""
    turn = greenlet.getcurrent()
    return getattr(turn, "steps", None) or _OUTSIDE


def free_memory() -> bool:
    """Let all suspended batches end, as a batch does not fit beside them; whether there were any."""
    turn = greenlet.getcurrent()
    return isinstance(turn, Turn) and turn.free_memory()


class Running:
    """While the context is open, this greenlet runs a batch, or prepares the items of a batch."""

    # PERF: every item is prepared in such a context; a context made of a generator costs twice as much.
    __slots__ = ("_before", "_steps", "_turn")

    def __init__(
        self, activity: Activity | None, pieces: Sequence[Item], make_way: Callable[[], None] | None = None
    ) -> None:
        """The batch consists of `pieces`, in this order. `activity` is None for items that are being prepared.

        `make_way` is called between two steps of the batch; None: the turn has its own.
        """
        turn = greenlet.getcurrent()
        if make_way is None and isinstance(turn, Turn):
            make_way = turn.make_way
        self._turn, self._before = turn, getattr(turn, "steps", None)
        self._steps = Steps(activity, pieces, make_way)

    def __enter__(self) -> None:
        self._turn.steps = self._steps

    def __exit__(self, *exc_info: object) -> None:
        self._turn.steps = self._before


def each(parts: Sequence[T], tokens: Sequence[int]) -> Iterator[T]:
    """The parts of a batch, of so many tokens each, with a step between two of them.

    Raises `Deserted` as soon as nobody waits for any item of the batch.
    """
    steps, whole = current(), sum(tokens)
    for number, (part, count) in enumerate(zip(parts, tokens, strict=True)):
        if not number and len(parts) > 1:
            steps.begin(count / whole)
        if number:
            # NOTE: to ask for the stream would make a context on a device that this process does not use.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # NOTE: until then the part before is only enqueued, and work that passes it now would wait for it.
                torch.cuda.current_stream().synchronize()
            steps.step(count / whole)
            if steps.deserted:
                raise Deserted("the request ended before all of its parts had run")
        yield part
