"""Threads that make items ready for the device while it runs the batch before.

Tokenizing is Rust outside the interpreter lock. A large request is prepared in chunks, so that its first items run
while its last ones are still text; one whose result takes a size that only prepared items tell waits for the last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from ipc.arena import Arena
from ipc.errors import InferenceFailed, InputTooLong, PenstockError
from ipc.messages import InputItem, ItemError
from workers.adapters.base import ItemFailure, Prepared
from workers.job import Job
from workers.jobs import JobBook
from workers.operations import operation_of
from workers.preparing_line import PreparingLine
from workers.queue import WorkQueue
from workers.threads import vital_thread

log = logging.getLogger(__name__)

CHUNK_ITEMS = 32
"""Texts of a chunk: some 10 ms, for which a query waits at most."""
CHUNK_IMAGES = 4
"""Images of a chunk: a large one takes seconds, and a request that has ended goes on until the end of its chunk."""


class Preparer:
    """A small pool of preparing threads in front of the queue."""

    def __init__(
        self,
        work: WorkQueue,
        book: JobBook,
        arena: Arena,
        threads: int,
        unplaced: Callable[[Job], None],
    ) -> None:
        """`unplaced` is told, in a preparing thread, of a job that is ready but has no output space yet."""
        self._work, self._book, self._arena, self._unplaced = work, book, arena, unplaced
        self._line = PreparingLine()
        self._lone_place = threads
        self._threads = [vital_thread(f"prepare-{n}", partial(self._run, n)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Prepare this job soon."""
        self._line.put(job)

    def close(self) -> None:
        """Stop the threads after what they are doing now."""
        self._line.close()

    def _run(self, place: int) -> None:
        while (job := self._line.get()) is not None:
            if self._prepare(job, place):
                # The rest of a large job lines up again, so that it holds nobody up for longer than a chunk.
                self._line.put(job)
            # NOTE: an idle thread must not keep the last job's model in memory.
            del job

    def prepare_now(self, job: Job) -> None:
        """Prepare a small job in the calling thread."""
        while self._prepare(job, self._lone_place):
            pass

    def _prepare(self, job: Job, place: int) -> bool:
        """Prepare the next chunk; a failure ends the job. Returns whether there is more to do."""
        if not self._book.claim(job):
            return False
        self._arena.record_preparing(place, job.tag, job.id)
        try:
            return self._chunk(job)
        except PenstockError as error:
            self._book.fail(job, error)
        except Exception:
            log.exception("preparing failed for request %s", job.request_id)
            self._book.fail(job, InferenceFailed("the input could not be prepared for this model"))
        finally:
            self._arena.record_preparing(place, 0, 0)
            self._book.unclaim(job)
        return False

    def _chunk(self, job: Job) -> bool:
        began = time.monotonic_ns()
        start, total = job.prepared_items, len(job.prepared)
        stop = _chunk_end(job.call.items, start)
        operation = operation_of(job.call)
        failures = _store(job, start, operation.prepare(job.adapter, job.call, start, stop, job.payload))
        job.prepared_items = stop
        ended = time.monotonic_ns()
        job.prepare_ns += ended - began
        if job.trace is not None:
            job.trace.prepared(began, ended)
        if stop == total and (cost := sum([item.cost for item in job.prepared])) != job.cost:
            self._book.correct(job, cost)
        if failures:
            self._book.complete(job, len(failures), failures)
        if job.output is not None:
            self._work.put(job, start, stop)
        elif stop == total:
            self._unplaced(job)
        return stop < total


def _chunk_end(items: Sequence[InputItem], start: int) -> int:
    """Where the chunk that begins at `start` ends."""
    stop, images = start, 0
    for item in items[start : start + CHUNK_ITEMS]:
        images += bool(item.images)
        if images > CHUNK_IMAGES:
            break
        stop += 1
    return stop


def _store(job: Job, start: int, found: Sequence[Prepared | ItemFailure]) -> list[ItemError]:
    """Put prepared items into their places; returns the errors of those that failed alone.

    Raises `InputTooLong` for an item that was cut although the caller asked for an error.
    """
    failures = []
    for index, item in enumerate(found, start):
        if isinstance(item, Prepared) and item.truncated and job.call.overflow == "error":
            field = "" if job.call.items[index].text is None else ".text"
            longest = job.adapter.max_sequence_length
            raise InputTooLong(
                f"items[{index}]{field}: longer than the {longest} tokens of {job.model}", model=job.model
            )
        if isinstance(item, ItemFailure):
            failures.append(ItemError(index, item.code, f"items[{index}]: {item.message}"))
            item = Prepared(None, 0, rows=0)
        job.prepared[index] = item
    return failures
