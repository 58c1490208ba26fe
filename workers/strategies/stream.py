"""Requests that are answered in parts: a few steps at a time, so that other batches run in between.

1. The first turn of a request begins its steps (`Adapter.stream`); each step gives one part, until there are no more.
2. A turn ends after `TURN_S`, when the frontend has enough parts that its client has not taken, and when the model
   yields a `Pause`. Then the request waits for the device again, like any other, or rests: the queue does not count the
   request until its client takes parts, or until there is room or the pause is over (`WaitingLine`).
3. A part that finds no room in the arena waits with its request, and is placed before the next step.
4. Whatever ends the request, its steps are closed here, in the thread that ran them; until then its inputs are in use.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ipc.errors import QueueFull, ShmExhausted, Unsupported
from ipc.wire.messages import Work
from ipc.wire.streams import Flow, part_flow
from workers.adapters.base import Pause
from workers.device import oom
from workers.device.stepping import batch_limit_s
from workers.operations import streaming_of
from workers.scheduling.context import Context
from workers.scheduling.job import Batch, Job, Piece, Strategy, collate, error_of, item_error
from workers.scheduling.queue import Reason
from workers.strategies.named_outputs import Placer
from workers.strategies.one_shot import note_batch

log = logging.getLogger(__name__)

TURN_S = 0.005
"""Seconds of steps in one turn, if nothing ends the turn before. A step is never interrupted."""


@dataclass(slots=True, eq=False)
class StreamState:
    """What a job keeps besides when its answer comes in parts.

    `flow` belongs to the lock of the table: how many parts may be sent ahead. The rest is the device thread's: `batch`
    since the stream has begun, `steps` of the adapter, `unsent` a part that found no room, `pause_until_ns` as the
    model asked.
    """

    flow: Flow
    pause_until_ns: int = 0
    batch: Any = None
    steps: Iterator[Any] | None = None
    unsent: Mapping[str, Any] | None = None
    lacks_room: bool = False


class Streams(Strategy):
    """All streams of one worker."""

    ends_late = in_turns = True

    def __init__(self, context: Context) -> None:
        self._context, self._activity = context, context.activity
        self._table, self._queue, self._line = context.jobs, context.queue, context.line
        self._placer = Placer(context.jobs, context.settings.arena.inline_bytes)
        # NOTE: steps of one model take milliseconds or seconds. The steps before do not say how long the next takes.
        self._step_limit_s = batch_limit_s(context.settings.worker.hang_timeout_s, 0.0)
        self._most_resting = context.settings.queue.max_resting_streams
        self._over: deque[Job] = deque()

    def check(self, work: Work) -> None:
        """Refuse a request that wants one answer, and any when too many streams rest."""
        if not work.parts:
            raise Unsupported(f"Model '{work.model}' gives any number of responses to a request")
        if self._table.resting[self] >= self._most_resting:
            raise QueueFull(
                f"{self._table.resting[self]} streams wait for clients that do not read "
                f"(queue.max_resting_streams {self._most_resting})",
                retry_after_s=1,
            )

    def admit(self, job: Job) -> None:
        """Give a job the state of a stream, of which nothing was sent."""
        job.strategy_state = StreamState(part_flow(job.work.parts))

    def group(self, job: Job) -> Hashable:
        """All streams of an instance; each has a batch of its own."""
        return None

    def is_batch(self, batch: Batch) -> bool:
        """The first turn of a stream stands for all."""
        return batch.first.batches == 1

    def run(self, batch: Batch) -> int:
        """Run steps of one request until its turn is over."""
        piece = batch.pieces[0]
        self._queue.device_busy()
        try:
            self._steps(piece, piece.job.strategy_state, batch)
        except BaseException as raised:
            error = error_of(raised)
            oom.forget_frames(error)
            self._table.complete(piece.job, 1, [item_error(piece, error)])
            return 0
        return piece.prepared.cost

    def _steps(self, piece: Piece, stream: StreamState, batch: Batch) -> None:
        job = piece.job
        if stream.batch is None:
            self._activity.begin(self._step_limit_s)
            collated = collate(batch.pieces) if batch.collated is None else batch.collated
            if not self._table.claim(job):
                return
            stream.batch = collated
            stream.steps = streaming_of(job.work.call).stream(job.adapter, collated)
        until = time.monotonic() + TURN_S
        while job.state == "open" and stream.flow.open:
            self._activity.begin(self._step_limit_s)
            if not self._step(piece, stream) or time.monotonic() >= until:
                return

    def _step(self, piece: Piece, stream: StreamState) -> bool:
        """Send one part more; False if there is no part, or no room for the part."""
        job, began = piece.job, time.monotonic_ns()
        if stream.unsent is None:
            assert stream.steps is not None
            try:
                # NOTE: a generator that is left inside of a torch context would take it along into other batches.
                with torch.inference_mode():
                    result = next(stream.steps)
            except StopIteration:
                job.device_ns += time.monotonic_ns() - began
                self._finish(piece)
                return False
            if isinstance(result, Pause):
                job.device_ns += time.monotonic_ns() - began
                stream.pause_until_ns = time.monotonic_ns() + int(max(0.0, result.seconds) * 1e9)
                return False
            stream.unsent = streaming_of(job.work.call).part(job.adapter, stream.batch, result)
        computed = time.monotonic_ns()
        job.device_ns += computed - began
        try:
            part = self._placer.part(piece, stream.unsent)
        except ShmExhausted:
            stream.lacks_room = True
            return False
        stream.unsent = None
        job.copy_ns += time.monotonic_ns() - computed
        self._context.counts.responded(job.model)
        with self._table.lock:
            stream.flow.sent(1, alone=part.output.block is not None)
        self._table.send_part(job, part)
        return True

    def _finish(self, piece: Piece) -> None:
        """All parts were sent: the request is done, and counts as one run of its model."""
        job, now = piece.job, time.monotonic_ns()
        note_batch([piece], job.first_run_ns, now - job.copy_ns, now)
        self._queue.rate.record(job.cost, job.device_ns / 1e9)
        rows = piece.prepared.payload.rows
        self._context.counts.note_run(job.model, rows, job.prepare_ns, job.device_ns, job.copy_ns)
        self._table.complete(job, 1, [])

    def after(self, batch: Batch) -> None:
        """After a turn: an open job waits for its next turn, or rests."""
        job = batch.first
        stream: StreamState = job.strategy_state
        with self._table.lock:
            if job.state != "open":
                return
            paused = stream.pause_until_ns > time.monotonic_ns()
            rests = stream.lacks_room or paused or not stream.flow.open
            if stream.lacks_room:
                self._line.add(job, Reason.PART)
            elif paused:
                self._line.add(job, Reason.PAUSE, stream.pause_until_ns)
            if rests:
                self._table.rest(job)
        if not rests:
            self._queue.put_again(job)

    def taken(self, job: Job, count: int) -> None:
        """Note that the frontend has taken parts of a stream, which makes room for more."""
        stream: StreamState = job.strategy_state
        with self._table.lock:
            stream.flow.taken(count)
            wakes = not self._line.holds(job) and stream.flow.open and self._table.resume(job)
        if wakes:
            self._queue.put_again(job)

    def wake_roomless(self) -> None:
        """Put the streams that found no room in the arena into the queue again."""
        for job in self._line.take(Reason.PART):
            job.strategy_state.lacks_room = False
            with self._table.lock:
                wakes = self._table.resume(job)
            if wakes:
                self._queue.put_again(job)

    def resume(self, job: Job) -> None:
        """Go on with a stream after the pause that its model asked for. Device thread only."""
        with self._table.lock:
            wakes = job.strategy_state.flow.open and self._table.resume(job)
        if wakes:
            self._queue.put_again(job)

    def ended(self, job: Job) -> None:
        """Have the device thread close the steps of the job."""
        self._over.append(job)
        self._queue.ask(self)

    def go_on(self) -> None:
        """Close the steps of requests that have ended. Device thread only."""
        while self._over:
            job = self._over.popleft()
            if job.strategy_state.batch is not None:
                self._activity.begin(self._step_limit_s)
                self._context.arena.record_flight([(job.tag, job.id)])
                self._close(job, job.strategy_state)
                self._context.arena.record_flight([])
                self._activity.end()

    def _close(self, job: Job, stream: StreamState) -> None:
        try:
            close = getattr(stream.steps, "close", None)
            if close is not None:
                with torch.inference_mode():
                    close()
        except BaseException as raised:
            text = "request %s: the model failed when its stream was closed"
            log.error(text, job.work.request_id, exc_info=error_of(raised))
        stream.steps = stream.batch = stream.unsent = None
        self._table.unclaim(job)

    def cancel_all(self) -> None:
        """The worker ends: close the steps that models have begun, even if a drain was too short for them."""
        for job in self._table.jobs():
            if job.strategy is self:
                self._table.cancel(job)
