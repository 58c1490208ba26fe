"""The book of open jobs: opened once, ended exactly once, whoever ends it.

A job ends by completion of all its items, by a failure, or by cancellation. Ending it posts the answer to the
endpoint's thread and counts its cost out of the queue. A job that is answered in parts rests while its frontend has
enough of them, and is not counted by the queue then; when it has ended, the device thread finds it in `over`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ipc.errors import DeadlineExceeded, PenstockError, QueueFull, of_items
from ipc.wire.messages import InferCall, ItemError, Result, TensorRef, Timing
from ipc.wire.streams import Part
from workers.endpoint.endpoint import Endpoint, block_ref
from workers.memory import outputs
from workers.scheduling.job import Job, Output, Piece
from workers.scheduling.queue import WorkQueue
from workers.scheduling.response_order import ResponseOrder
from workers.strategies.sequences import Outcome
from workers.strategies.streamed import PlacedPart, Streamed

log = logging.getLogger(__name__)


class JobBook:
    """Open jobs by (session, id)."""

    def __init__(self, queue: WorkQueue, endpoint: Callable[[], Endpoint]) -> None:
        self._queue, self._endpoint = queue, endpoint
        self._open: dict[tuple[bytes, int], Job] = {}
        self._order = ResponseOrder()
        self._lock = threading.Lock()
        self._roomless: list[Job] = []
        self._paused: list[Job] = []
        """Streams whose models wait. Device thread only."""
        self.resting = 0
        """Streams that rest."""
        self.over: deque[Job] = deque()
        """Streams that have ended and that the device thread has not closed yet."""

    def __len__(self) -> int:
        return len(self._open)

    def jobs(self) -> list[Job]:
        """All open jobs."""
        with self._lock:
            return list(self._open.values())

    def adapters(self) -> set[int]:
        """Identities of the adapters that open jobs use."""
        return {id(job.adapter) for job in self.jobs()}

    def fail_all(self, adapter: object, error: PenstockError) -> None:
        """Fail every open job of an adapter."""
        for job in self.jobs():
            if job.adapter is adapter:
                self.fail(job, error)

    def open(self, job: Job) -> None:
        """A job begins; its cost has been admitted."""
        self._order.enter(job)
        with self._lock:
            self._open[job.session, job.id] = job

    def find(self, session: bytes, request: int) -> Job | None:
        """The open job of that request."""
        return self._open.get((session, request))

    def complete(self, job: Job, items: int, errors: list[ItemError]) -> None:
        """`items` more items are done, of which `errors` failed; the last one sends the result."""
        with self._lock:
            job.open_items -= items
            job.errors.update({error.index: error for error in errors})
            failed = len(job.errors) == len(job.prepared)
            if job.open_items > 0 or not self._end(job, "failed" if failed else "done"):
                return
        if failed:
            self._post_failure(job, of_items(list(job.errors.values())))
        else:
            self._post_result(job)
            self._end_turn(job)

    def fail(self, job: Job, error: PenstockError) -> None:
        """The whole request fails."""
        with self._lock:
            if not self._end(job, "failed"):
                return
        self._queue.remove(job)
        self._post_failure(job, error)

    def cancel(self, job: Job) -> int:
        """Nobody waits any more. Returns how many of its items were still waiting for the device."""
        with self._lock:
            if not self._end(job, "cancelled"):
                return 0
        waiting = self._queue.remove(job)
        self._free(job)
        self._order.withdraw(job)
        return waiting

    def cancel_streams(self) -> None:
        """The worker ends; what its models have begun is to be closed even if a drain was too short for it."""
        for job in self.jobs():
            if job.stream is not None:
                self.cancel(job)

    def check_resting(self, most: int) -> None:
        """Raise `QueueFull` when no other stream may begin."""
        if self.resting >= most:
            raise QueueFull(
                f"{self.resting} streams wait for clients that do not read (queue.max_resting_streams {most})",
                retry_after_s=1,
            )

    def expire(self) -> list[Job]:
        """Fail every job that is late (`Job.is_late`); returns them."""
        now = time.monotonic_ns()
        late = [job for job in self.jobs() if job.is_late(now)]
        for job in late:
            self._fail_late(job)
        return late

    def _fail_late(self, job: Job) -> None:
        where = "in the middle of the answer" if job.first_run_ns else "in the queue"
        self.fail(job, DeadlineExceeded(f"the deadline passed {where}", retry_after_s=1))

    def send_part(self, job: Job, stream: Streamed, part: PlacedPart) -> None:
        """One part of the answer; the endpoint gives its block back when the job has ended meanwhile."""
        endpoint, output = self._endpoint(), part.output
        with self._lock:
            stream.flow.sent(output.block is not None)
        inline = bytes(output.buffer) if output.block is None else None
        message = Part(
            Result(job.id, block_ref(output.block), part.refs, [], [], [], Timing(), infos=part.infos)
        )
        endpoint.post(lambda: endpoint.part(job.session, message, output.block, inline))

    def go_on(self, job: Job, stream: Streamed) -> None:
        """The device is done with some steps of a stream: it waits for the device again, or rests."""
        with self._lock:
            if job.state != "open":
                return
            stream.paused = stream.pause_until_ns > time.monotonic_ns()
            rests = stream.roomless or stream.paused or not stream.flow.open
            if stream.roomless:
                self._roomless.append(job)
            if stream.paused:
                self._paused.append(job)
            if rests:
                stream.resting = True
                self.resting += 1
                self._queue.settle(job.cost, job.lane, job.caller)
        if not rests:
            self._put_again(job)

    def taken(self, job: Job, count: int) -> None:
        """The frontend has taken parts of a stream."""
        stream = job.stream
        if stream is None:
            return
        with self._lock:
            stream.flow.taken(count)
            held = stream.roomless or stream.paused
            wakes = not held and stream.flow.open and self._wake(job, stream)
        if wakes:
            self._put_again(job)

    def wake_roomless(self) -> None:
        """Streams that found no room in the arena try again."""
        if not self._roomless:
            return
        with self._lock:
            waiting, self._roomless = self._roomless, []
            woken = []
            for job in waiting:
                if job.stream is not None:
                    job.stream.roomless = False
                    if self._wake(job, job.stream):
                        woken.append(job)
        for job in woken:
            self._put_again(job)

    def paused_until_ns(self) -> int | None:
        """When the first of the streams whose models wait goes on; None without any. Device thread only."""
        ends = [job.stream.pause_until_ns for job in self._paused if job.stream and job.state == "open"]
        return min(ends, default=None)

    def wake_paused(self) -> None:
        """Streams whose models have waited long enough go on. Device thread only."""
        if not self._paused:
            return
        now, waiting, woken = time.monotonic_ns(), self._paused, []
        self._paused = []
        with self._lock:
            for job in waiting:
                stream = job.stream
                if stream is None or job.state != "open":
                    continue
                if stream.pause_until_ns > now:
                    self._paused.append(job)
                    continue
                stream.paused = False
                if stream.flow.open and self._wake(job, stream):
                    woken.append(job)
        for job in woken:
            self._put_again(job)

    def _wake(self, job: Job, stream: Streamed) -> bool:
        """Count an open stream in again that rested; whether it did."""
        if job.state != "open" or not stream.resting:
            return False
        stream.resting = False
        self.resting -= 1
        self._queue.resume(job.cost, job.lane, job.caller, job.share)
        return True

    def _put_again(self, job: Job) -> None:
        job.queued_ns = time.monotonic_ns()
        self._queue.put(job, 0, len(job.prepared))

    def attach(self, job: Job, output: Output) -> None:
        """Give an open job its output space; an ended one gives it back at once."""
        with self._lock:
            if job.state == "open":
                job.output = output
                return
        self.give_back(output)

    def reserve(self, nbytes: int) -> Output:
        """Output space of a size that was not known before; `replace` gives it to its job.

        Raises `ShmExhausted` when there is no room now, and `InvalidInput` when there never is.
        """
        leases = self._endpoint().leases
        outputs.check_size(nbytes, leases)
        block = leases.reserve(nbytes)
        if block is None:
            raise outputs.exhausted(1.0)
        return Output(block, leases.data(block), {})

    def give_back(self, output: Output) -> None:
        """End an output that `reserve` gave and that no job has got."""
        if output.block is not None:
            self._endpoint().leases.discard(output.block)

    def replace(self, job: Job, refs: list[TensorRef], output: Output) -> None:
        """Give an open job the output that was made for it, in place of any it had; an ended one gives it back."""
        unused: Output | None = output
        with self._lock:
            if job.state == "open":
                unused, job.output, job.refs = job.output, output, refs
        if unused is not None:
            self.give_back(unused)

    def correct(self, job: Job, cost: int) -> None:
        """Replace the estimated cost of an open job by the real one."""
        with self._lock:
            if job.state == "open":
                self._queue.correct(cost - job.cost, job.lane, job.caller)
                job.cost = cost

    def _end(self, job: Job, state: str) -> bool:
        if self._open.pop((job.session, job.id), None) is None:
            return False
        job.state = state
        if job.stream is not None and job.stream.resting:
            self.resting -= 1
        else:
            self._queue.settle(job.cost, job.lane, job.caller)
        if job.stream is not None:
            self.over.append(job)
            self._queue.nudge()
        return True

    def claim(self, job: Job) -> bool:
        """A preparing thread or a stream begins to read a job's input, unless it has ended; `unclaim` follows."""
        with self._lock:
            if job.state == "open":
                job.claims += 1
                return True
        return False

    def unclaim(self, job: Job) -> None:
        """Whoever claimed it is done with its input."""
        with self._lock:
            job.claims -= 1
        if job.state in ("cancelled", "failed"):
            self._free(job)

    def board(self, pieces: list[Piece]) -> list[Piece]:
        """Those pieces whose job is open and not late; from now on the device may write to their output."""
        now = time.monotonic_ns()
        for job in {id(piece.job): piece.job for piece in pieces if piece.job.is_late(now)}.values():
            self._fail_late(job)
        with self._lock:
            boarded = [piece for piece in pieces if piece.job.state == "open"]
            for piece in boarded:
                piece.job.claims += 1
        return boarded

    def land(self, pieces: list[Piece]) -> None:
        """The device is done with these pieces; blocks of jobs that ended meanwhile are given back."""
        with self._lock:
            for piece in pieces:
                piece.job.claims -= 1
        for piece in pieces:
            if piece.job.state in ("cancelled", "failed"):
                self._free(piece.job)

    def _free(self, job: Job) -> None:
        """Give the blocks of an ended job back, unless somebody works with them: then `land` or `unclaim` does."""
        if job.claims:
            return
        endpoint = self._endpoint()
        if job.output is not None and job.output.block is not None:
            endpoint.leases.discard(job.output.block)
        if isinstance(job.call, InferCall):
            endpoint.post(lambda: endpoint.unread(job.session, job.id))
        self._end_turn(job)

    def _end_turn(self, job: Job) -> None:
        """Nothing runs for an ended job any more: the next of its sequence may."""
        outcome = self._queue.sequencer.finish(job)
        if outcome is not None:
            self.follow(outcome)

    def follow(self, outcome: Outcome) -> None:
        """Run and fail the jobs of sequences whose turn has come, or comes no more."""
        for job in outcome.void:
            if outcome.error is not None:
                self.fail(job, outcome.error)
        for job in outcome.run:
            self._queue.put(job, 0, len(job.prepared))

    def _post_failure(self, job: Job, error: PenstockError) -> None:
        self._free(job)
        endpoint = self._endpoint()
        self._order.answer(job, lambda: endpoint.post(lambda: endpoint.fail(job.session, job.id, error)))

    def _post_result(self, job: Job) -> None:
        output, endpoint = job.output, self._endpoint()
        if output is None:
            self._order.withdraw(job)
            return
        queued_ns = job.queued_ns if job.stream is None else job.stream.queued_ns
        timing = Timing(
            job.prepare_ns, max(0, job.first_run_ns - queued_ns), job.device_ns, job.copy_ns, job.batches
        )
        loose, inline = outputs.loose_frame(job)
        result = Result(
            job.id,
            block_ref(output.block),
            job.refs,
            [item.cost for item in job.prepared],
            [index for index, item in enumerate(job.prepared) if item.truncated],
            [job.errors[index] for index in sorted(job.errors)],
            timing,
            loose,
            outputs.rows_of(job),
            None if job.trace is None else job.trace.record(queued_ns),
            job.infos,
        )
        self._order.answer(
            job, lambda: endpoint.post(lambda: endpoint.reply(job.session, result, output.block, inline))
        )
