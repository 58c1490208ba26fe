"""Runs requests that are answered in parts: a few steps at a time, so that other batches run in between.

1. The first stint of a request begins its steps (`Adapter.stream`); each step gives one part, until there are no more.
2. A stint ends after `STINT_S`, when the frontend has enough parts that its client has not taken, and when the model
   yields a `Pause`. Then the request waits for the device again, like any other, or rests (`JobBook.go_on`).
3. A part that finds no room in the arena is kept, and tried again before the next step.
4. Whatever ends the request, its steps are closed here, in the thread that ran them; until then its inputs are in use.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ipc.errors import ShmExhausted
from workers.adapters.base import Pause
from workers.device.watchdog import Activity
from workers.memory.named_outputs import Placer
from workers.operations import streaming_of
from workers.reporting import tracing
from workers.reporting.executions import Executions
from workers.scheduling.job import Job, Piece
from workers.scheduling.jobs import JobBook
from workers.scheduling.queue import DrainRate
from workers.strategies.interlude import Flight
from workers.strategies.streamed import Streamed

log = logging.getLogger(__name__)

STINT_S = 0.005
"""Steps go on for so long while nothing ends them; a step is never interrupted."""


class Generations:
    """All streams of one worker. Device thread only."""

    def __init__(
        self,
        book: JobBook,
        placer: Placer,
        executions: Executions,
        activity: Activity,
        rate: DrainRate,
        record_flight: Callable[[Flight], None],
    ) -> None:
        """`record_flight` names the requests that are on the device."""
        self._book, self._placer, self._executions = book, placer, executions
        self._activity, self._rate, self._record_flight = activity, rate, record_flight

    def stint(self, piece: Piece, stream: Streamed, batch: object, limit_s: float) -> None:
        """Some steps of one request, each of which may take `limit_s`. Raises what the model raised."""
        job = piece.job
        if stream.batch is None:
            if not self._book.claim(job):
                return
            stream.batch, stream.queued_ns = batch, job.queued_ns
            self._activity.begin(limit_s)
            stream.steps = streaming_of(job.call).stream(job.adapter, batch)
        until = time.monotonic() + STINT_S
        while job.state == "open" and stream.flow.open:
            self._activity.begin(limit_s)
            if not self._step(piece, stream) or time.monotonic() >= until:
                return

    def _step(self, piece: Piece, stream: Streamed) -> bool:
        """One part more; False when there are no more, or there is no room for it now."""
        job, began = piece.job, time.monotonic_ns()
        if stream.unsent is None:
            assert stream.steps is not None
            try:
                # NOTE: a generator that is left inside of a torch context would take it along into other batches.
                with torch.inference_mode():
                    found = next(stream.steps)
            except StopIteration:
                job.device_ns += time.monotonic_ns() - began
                self._finish(piece, stream)
                return False
            if isinstance(found, Pause):
                job.device_ns += time.monotonic_ns() - began
                stream.pause_until_ns = time.monotonic_ns() + int(max(0.0, found.seconds) * 1e9)
                return False
            stream.unsent = streaming_of(job.call).part(job.adapter, stream.batch, found)
        computed = time.monotonic_ns()
        job.device_ns += computed - began
        try:
            part = self._placer.part(piece, stream.unsent)
        except ShmExhausted:
            stream.roomless = True
            return False
        stream.unsent = None
        job.copy_ns += time.monotonic_ns() - computed
        self._executions.responded(job.model)
        self._book.send_part(job, stream, part)
        return True

    def _finish(self, piece: Piece, stream: Streamed) -> None:
        """All parts were sent: the request is done, and counts as one run of its model."""
        job, now = piece.job, time.monotonic_ns()
        tracing.note_batch([piece], job.first_run_ns, now - job.copy_ns, now)
        self._rate.record(job.cost, job.device_ns / 1e9)
        self._executions.note(job.model, piece.prepared.payload.rows, 0, job.device_ns, job.copy_ns)
        self._book.complete(job, 1, [])

    def go_on(self, job: Job, stream: Streamed) -> None:
        """After a stint: the request waits for its next one, or rests, unless it has ended."""
        if job.state == "open":
            self._book.go_on(job, stream)

    def close_ended(self, limit_s: float) -> None:
        """Close the steps of requests that have ended, which may take `limit_s` each."""
        while self._book.over:
            job = self._book.over.popleft()
            if job.stream is not None and job.stream.batch is not None:
                self._activity.begin(limit_s)
                self._record_flight([(job.tag, job.id)])
                self._close(job, job.stream)
                self._record_flight([])
                self._activity.end()

    def _close(self, job: Job, stream: Streamed) -> None:
        close = getattr(stream.steps, "close", None)
        try:
            if close is not None:
                with torch.inference_mode():
                    close()
        except Exception:
            log.exception("request %s: the model failed when its stream was closed", job.request_id)
        finally:
            stream.steps = stream.batch = stream.unsent = None
            self._book.unclaim(job)
