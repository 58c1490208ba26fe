"""Threads that make items ready for the device while it runs the batch before.

Tokenizing is Rust outside the interpreter lock. A large request is prepared in chunks, so that its first items run
while its last ones are still text; one whose result takes a size that only prepared items tell waits for the last.
A single text may be longer than any chunk: of several threads one leaves such texts to the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from ipc.errors import InferenceFailed, InputTooLong, InvalidInput, PenstockError
from ipc.memory.arena import Arena
from ipc.wire.messages import ItemError
from workers.adapters.base import Excess, ItemFailure, ItemRefused, Prepared
from workers.device.threads import vital_thread
from workers.operations import operation_of
from workers.scheduling.chunks import chunk_end, is_long
from workers.scheduling.job import Job
from workers.scheduling.jobs import JobBook
from workers.scheduling.preparing_line import PreparingLine
from workers.scheduling.queue import WorkQueue

log = logging.getLogger(__name__)


class Preparer:
    """A small pool of preparing threads in front of the queue."""

    def __init__(
        self,
        work: WorkQueue,
        book: JobBook,
        arena: Arena,
        threads: int,
        most_chunked: int,
        unplaced: Callable[[Job], None],
    ) -> None:
        """`most_chunked` is `limits.max_chunked_tokens`.

        `unplaced` is told, in a preparing thread, of a job that is ready but has no output space yet.
        """
        self._most_chunked = most_chunked
        self._work, self._book, self._arena, self._unplaced = work, book, arena, unplaced
        self._line = PreparingLine()
        self._lone_place = threads
        self._quick_place = 0 if threads > 1 else None
        self._threads = [vital_thread(f"prepare-{n}", partial(self._run, n)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Prepare this job soon."""
        self._line.put(job, is_long(job.call, job.prepared_items))

    def close(self) -> None:
        """Stop the threads after what they are doing now."""
        self._line.close()

    def _run(self, place: int) -> None:
        while (job := self._line.get(quick=place == self._quick_place)) is not None:
            if self._prepare(job, place):
                # The rest of a large job lines up again, so that it holds nobody up for longer than a chunk.
                self.put(job)
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
        except ItemRefused as refusal:
            self._book.fail(job, _named(job, refusal))
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
        stop = chunk_end(job.call, start)
        operation = operation_of(job.call)
        failures = _store(job, start, operation.prepare(job.adapter, job.call, start, stop, job.payload))
        if job.call.overflow == "chunk":
            self._bound(job, start, stop)
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

    def _bound(self, job: Job, start: int, stop: int) -> None:
        """Raise `InputTooLong` for an item that is split into more than one item may be."""
        for index in range(start, stop):
            tokens = job.prepared[index].cost
            if tokens > self._most_chunked:
                limit = f"limits.max_chunked_tokens is {self._most_chunked}"
                raise InputTooLong(f"{_field(job, index)}: {tokens} tokens, {limit}", model=job.model)


def _field(job: Job, index: int) -> str:
    """The item, or its text, in the words of the route."""
    names = job.call.names
    return (names.item if job.call.items[index].text is None else names.text).format(index)


def _store(job: Job, start: int, found: Sequence[Prepared | ItemFailure]) -> list[ItemError]:
    """Put prepared items into their places; returns the errors of those that failed alone.

    Raises `InputTooLong` for an item that was cut although the caller asked for an error.
    """
    failures = []
    for index, item in enumerate(found, start):
        if isinstance(item, Prepared) and item.truncated and job.call.overflow == "error":
            raise _too_long(job, index, item.excess)
        if isinstance(item, ItemFailure):
            place = job.call.names.item.format(index)
            failures.append(ItemError(index, item.code, f"{place}: {item.message}"))
            item = Prepared(None, 0, rows=0)
        job.prepared[index] = item
    return failures


def _named(job: Job, refusal: ItemRefused) -> InvalidInput:
    """The error of an item, or of the query beside the items, that cannot be used."""
    names = job.call.names
    place = next((index for index, item in enumerate(job.call.items) if item is refusal.item), None)
    return InvalidInput(f"{names.query if place is None else names.item.format(place)}: {refusal}")


def _too_long(job: Job, index: int, excess: Excess | None) -> InputTooLong:
    """The error of an item that may not be cut, or of the query before it."""
    field = _field(job, index)
    if excess is None:
        longest = job.adapter.max_sequence_length
        return InputTooLong(f"{field}: longer than the {longest} tokens of {job.model}", model=job.model)
    if excess.in_query:
        field = job.call.names.query
    beside = f" {excess.beside}" if excess.beside else ""
    return InputTooLong(
        f"{field}: {excess.tokens} tokens{beside}, the limit of {job.model} is {excess.limit}",
        model=job.model,
    )
