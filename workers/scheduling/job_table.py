"""The table of open jobs, which posts their answers: each job enters once, and ends once, whoever ends the job.

A job ends by completion of all its items, by a failure, or by cancellation. The end posts the answer to the endpoint's
thread and counts the job's cost out of the queue. The job's memory is given back when no thread uses the memory.

Answers of models with `preserve_ordering` leave in the order in which their requests came: an answer that is ready
before an earlier answer waits for the earlier one. A request without an answer (a cancelled one) holds nobody up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ipc.errors import DeadlineExceeded, PenstockError, of_items
from ipc.wire.messages import InferCall, ItemError, Result, TensorInfo, TensorRef, Timing
from ipc.wire.streams import Deltas, Part
from workers.adapters.base import Adapter
from workers.endpoint.endpoint import Endpoint, block_ref
from workers.scheduling.job import Job, Output, Piece
from workers.scheduling.outputs import arena_full, check_result_size, loose_frame, rows_of
from workers.scheduling.queue import WorkQueue

Send = Callable[[], None]


@dataclass(slots=True, eq=False)
class PlacedPart:
    """The outputs of one part of an answer, written to their place."""

    infos: list[TensorInfo]
    refs: list[TensorRef]
    output: Output


class JobTable:
    """Open jobs by (session, id). Any thread may call; `lock` guards the states of jobs."""

    def __init__(self, queue: WorkQueue, endpoint: Endpoint) -> None:
        self._queue, self._endpoint = queue, endpoint
        self._open: dict[tuple[bytes, int], Job] = {}
        self.lock = threading.Lock()
        self._order_lock = threading.Lock()
        self._ordered: WeakKeyDictionary[Adapter, dict[Job, Send | None]] = WeakKeyDictionary()
        """Jobs whose answers keep their order, by instance, with the answers that are ready."""
        self.resting: Counter[Any] = Counter()
        """Open jobs that rest, by strategy."""

    def __len__(self) -> int:
        return len(self._open)

    def jobs(self) -> list[Job]:
        """All open jobs."""
        with self.lock:
            return list(self._open.values())

    def adapters(self) -> set[int]:
        """Identities of the adapters that open jobs use."""
        return {id(job.adapter) for job in self.jobs()}

    def fail_all(self, adapter: object, error: PenstockError) -> None:
        """Fail every open job of an adapter."""
        for job in self.jobs():
            if job.adapter is adapter:
                self.fail(job, error)

    def enter(self, job: Job) -> None:
        """Add a job whose cost the queue has admitted."""
        config = None if job.adapter is None else job.adapter.config
        if config is not None and config.dynamic_batching and config.dynamic_batching.preserve_ordering:
            with self._order_lock:
                self._ordered.setdefault(job.adapter, {})[job] = None
                job.ordered = True
        with self.lock:
            self._open[job.session, job.id] = job

    def find(self, session: bytes, request: int) -> Job | None:
        """The open job of that request."""
        return self._open.get((session, request))

    def wake_endpoint(self) -> None:
        """Have the endpoint send the answers that were posted without `wake`."""
        self._endpoint.wake()

    def complete(self, job: Job, items: int, errors: list[ItemError], wake: bool = True) -> None:
        """`items` more items are done, of which `errors` failed; the last one sends the result.

        Without `wake` the answer leaves after `wake_endpoint`, together with the answers to other jobs.
        """
        with self.lock:
            job.open_items -= items
            for error in errors:
                job.errors[error.index] = error
            failed = len(job.errors) == len(job.prepared)
            if job.open_items > 0 or not self._end(job, "failed" if failed else "done"):
                return
        job.strategy.ended(job)
        if failed:
            self._post_failure(job, of_items(list(job.errors.values())))
        else:
            self._post_result(job, wake)
            job.strategy.left(job)

    def fail(self, job: Job, error: PenstockError) -> None:
        """End a job with an error for all of its items."""
        with self.lock:
            if not self._end(job, "failed"):
                return
        job.strategy.ended(job)
        self._queue.remove(job)
        self._post_failure(job, error)

    def cancel(self, job: Job) -> int:
        """Nobody waits for a job any more. Returns the number of its items that still waited for the device."""
        with self.lock:
            if not self._end(job, "cancelled"):
                return 0
        job.strategy.ended(job)
        waiting = self._queue.remove(job)
        self._free(job)
        self._answer(job, _nothing)
        return waiting

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

    def _end(self, job: Job, state: str) -> bool:
        if self._open.pop((job.session, job.id), None) is None:
            return False
        job.state = state
        if job.resting:
            self.resting[job.strategy] -= 1
        else:
            self._queue.settle(job)
        return True

    def rest(self, job: Job) -> None:
        """The queue counts an open job no longer: the job waits for its own client or for room, or has its sequences.

        With `lock` held.
        """
        job.resting = True
        self.resting[job.strategy] += 1
        self._queue.settle(job)

    def resume(self, job: Job) -> bool:
        """Count an open job in again; False for a job that did not rest. With `lock` held."""
        if job.state != "open" or not job.resting:
            return False
        job.resting = False
        self.resting[job.strategy] -= 1
        self._queue.count_in(job)
        return True

    def attach(self, job: Job, output: Output) -> None:
        """Give an open job its output space; the space of an ended job is free at once."""
        with self.lock:
            if job.state == "open":
                job.output = output
                return
        self.give_back(output)

    def reserve(self, nbytes: int) -> Output:
        """Output space of a size that was not known before; `replace` gives it to its job.

        Raises `ShmExhausted` when there is no room now, and `InvalidInput` when there never is.
        """
        leases = self._endpoint.leases
        check_result_size(nbytes, leases)
        block = leases.reserve(nbytes)
        if block is None:
            raise arena_full(1.0)
        return Output(block, leases.data(block), {})

    def give_back(self, output: Output) -> None:
        """Free an output of `reserve` that was given to no job."""
        if output.block is not None:
            self._endpoint.leases.discard(output.block)

    def replace(self, job: Job, refs: list[TensorRef], output: Output) -> None:
        """Give an open job another output in place of any that it had; the output of an ended job is free at once."""
        unused: Output | None = output
        with self.lock:
            if job.state == "open":
                unused, job.output, job.refs = job.output, output, refs
        if unused is not None and unused.block is not None:
            self.give_back(unused)

    def correct(self, job: Job, cost: int) -> None:
        """Replace the estimated cost of an open job by the real one."""
        with self.lock:
            if job.state == "open":
                self._queue.correct(job, cost)

    def claim(self, job: Job) -> bool:
        """A preparing thread or a stream begins to read a job's input, unless it has ended; `unclaim` follows."""
        with self.lock:
            if job.state == "open":
                job.claims += 1
                return True
        return False

    def unclaim(self, job: Job) -> None:
        """A thread that claimed the job is done with its input."""
        with self.lock:
            job.claims -= 1
        if job.state in ("cancelled", "failed"):
            self._free(job)

    def claim_pieces(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces whose jobs are open and not late. From now on the device may write to the outputs of these."""
        now = time.monotonic_ns()
        for job in {id(piece.job): piece.job for piece in pieces if piece.job.is_late(now)}.values():
            self._fail_late(job)
        with self.lock:
            claimed = [piece for piece in pieces if piece.job.state == "open"]
            for piece in claimed:
                piece.job.claims += 1
        return claimed

    def unclaim_pieces(self, pieces: list[Piece]) -> None:
        """The device is done with these pieces; blocks of jobs that ended meanwhile are given back."""
        with self.lock:
            for piece in pieces:
                piece.job.claims -= 1
        for piece in pieces:
            if piece.job.state in ("cancelled", "failed"):
                self._free(piece.job)

    def _free(self, job: Job) -> None:
        """Give the blocks of an ended job back. While somebody works with them, the last `unclaim` does that."""
        if job.claims:
            return
        endpoint = self._endpoint
        if job.output is not None and job.output.block is not None:
            endpoint.leases.discard(job.output.block)
        if isinstance(job.work.call, InferCall):
            endpoint.post(lambda: endpoint.unread(job.session, job.id))
        job.strategy.left(job)

    def send_part(self, job: Job, part: PlacedPart) -> None:
        """One part of the answer; the endpoint gives its block back when the job has ended meanwhile."""
        endpoint, output = self._endpoint, part.output
        inline = bytes(output.buffer) if output.block is None else None
        message = Part(
            Result(job.id, block_ref(output.block), part.refs, [], [], [], Timing(), infos=part.infos)
        )
        endpoint.post(lambda: endpoint.part(job.session, message, output.block, inline))

    def send_deltas(self, session: bytes, deltas: Deltas) -> None:
        """Send the output of a step for the streams of a session, after `wake_endpoint` or with the next answer."""
        self._endpoint.post(partial(self._endpoint.deltas, session, deltas), wake=False)

    def _post_failure(self, job: Job, error: PenstockError) -> None:
        self._free(job)
        endpoint = self._endpoint
        self._answer(job, lambda: endpoint.post(lambda: endpoint.fail(job.session, job.id, error)))

    def _post_result(self, job: Job, wake: bool) -> None:
        output, endpoint = job.output, self._endpoint
        if output is None:
            self._answer(job, _nothing)
            return
        timing = Timing(
            job.prepare_ns,
            max(0, job.first_run_ns - job.first_queued_ns),
            job.device_ns,
            job.copy_ns,
            job.batches,
            job.collate_ns,
            job.text,
        )
        loose, inline = loose_frame(job)
        result = Result(
            job.id,
            block_ref(output.block),
            job.refs,
            [item.cost for item in job.prepared],
            [index for index, item in enumerate(job.prepared) if item.truncated],
            [job.errors[index] for index in sorted(job.errors)],
            timing,
            loose,
            rows_of(job),
            None if job.trace is None else job.trace.record(job.first_queued_ns),
            job.infos,
            job.adapter.identity,
        )
        reply = partial(endpoint.reply, job.session, result, output.block, inline)
        if job.ordered:
            self._answer(job, partial(endpoint.post, reply))
        else:
            endpoint.post(reply, wake)

    def _answer(self, job: Job, send: Send) -> None:
        """Send the answer of a job, or keep the answer back until earlier jobs in the same order have sent theirs."""
        if not job.ordered:
            send()
            return
        with self._order_lock:
            line = self._ordered[job.adapter]
            line[job] = send
            while line:
                first = next(iter(line))
                ready = line[first]
                if ready is None:
                    return
                del line[first]
                ready()


def _nothing() -> None:
    pass
