"""What the kinds of jobs do differently, behind one interface.

Device thread, queue and table of jobs know jobs as work that wants a turn. A `Strategy` is one kind of job: a batch in
one pass (`one_shot`), a request of a sequence (`sequence`), an answer in parts (`stream`).

1. `check` and `admit` may refuse an arriving job or note where it stands; `has_place` and `arrive` may hold it back.
2. `run` is a turn on the device. A job that needs more turns is put into the queue again by its strategy.
3. Of jobs that wait for something else than the device, the strategy is called in the device thread: `resume` when the
   pause of a job is over, `go_on` after the strategy has asked for it (`WorkQueue.ask`).
4. `ended` and `left` tell of its end: the first at once, the second when nothing works with its memory any more.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable

from ipc import logs
from ipc.errors import Unsupported
from ipc.wire.messages import ItemError, Work
from workers import foreign, operations
from workers.device import oom
from workers.device.stepping import EXIT_BUG
from workers.scheduling.job import Batch, Job, Piece

log = logging.getLogger(__name__)

EXIT_DEVICE_LOST = 4


class Strategy:
    """One kind of job."""

    ends_late = False
    """Whether a job that runs ends at its deadline; else what has begun goes on."""
    in_turns = False
    """Whether a job takes many turns; then a turn counts for the pace of its model only."""
    bounds_itself = False
    """Whether `admit` bounds what waits, so that the queue need not."""

    def is_batch(self, batch: Batch) -> bool:
        """Whether a turn counts as a batch of its model."""
        return True

    def check(self, work: Work) -> None:
        """Raise a `PenstockError` for a request that does not fit the kind of its model."""
        # NOTE: the model may have changed since the frontend looked at its configuration.
        if work.parts:
            raise Unsupported(f"Model '{work.model}' gives one response, and no stream, to a request")

    def admit(self, job: Job) -> None:
        """A job has come, and the queue counts it. Raises a `PenstockError` to refuse it."""

    def group(self, job: Job) -> Hashable:
        """Jobs of one model with equal groups may share a batch."""
        return operations.group_of(job.adapter, job.work.call)

    def has_place(self, job: Job) -> bool:
        """Whether the job may hold room for its result; a job without a place would keep room from those before it."""
        return True

    def arrive(self, job: Job) -> bool:
        """A job is prepared and has room; whether it may wait for the device now. Any thread."""
        return True

    def run(self, batch: Batch) -> int:
        """One turn of a batch; returns how many tokens ran whole. Device thread only, raises nothing."""
        raise NotImplementedError

    def after(self, batch: Batch) -> None:
        """The device has let go of the batch. Device thread only."""

    def taken(self, job: Job, count: int) -> None:
        """The frontend has taken so much of what the job has sent ahead. Endpoint thread only."""

    def go_on(self) -> None:
        """See to jobs that have ended or can go on, also when the worker ends. Device thread only."""

    def resume(self, job: Job) -> None:
        """The pause of a job is over. Device thread only."""

    def ended(self, job: Job) -> None:
        """A job has ended; it may still be on the device. Any thread, must not wait."""

    def left(self, job: Job) -> None:
        """Nothing works with the memory of an ended job any more. Any thread."""


def item_error(piece: Piece, error: Exception) -> ItemError:
    """The error of an item by what the model raised on it alone."""
    if oom.is_out_of_memory(error):
        text = f"item {piece.index} ({piece.prepared.cost} tokens) does not fit in device memory"
        return ItemError(piece.index, "RESOURCE_EXHAUSTED", text)
    operation = operations.operation_of(piece.job.work.call)
    place = f"request {piece.job.work.request_id} item {piece.index} failed in the model"
    text = "the model failed on this input"
    answer = foreign.answer_of(
        error,
        place,
        f"item {piece.index}: {text}" if operation.itemized else text,
        may_refuse=operation.refuses,
        tells=piece.job.adapter.tells_errors,
    )
    return ItemError(piece.index, answer.code, answer.message)


def error_of(raised: BaseException) -> Exception:
    """The error with which a turn goes on after code of a model raised.

    Ends the process when the device context is poisoned: nothing may run on it again.
    """
    error = foreign.error_of(raised)
    if oom.is_out_of_memory(error) or not oom.context_is_broken():
        return error
    code = EXIT_DEVICE_LOST if oom.is_device_lost(error) else EXIT_BUG
    log.critical("the device context is lost (%s); this process ends", type(error).__name__, exc_info=error)
    logs.flush()
    os._exit(code)
