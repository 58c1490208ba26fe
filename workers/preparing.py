"""Threads that make items ready for the device while it runs the batch before.

Tokenizing is Rust outside the interpreter lock. A large request is prepared in chunks, so that its first items run
while its last ones are still text.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from ipc.errors import InferenceFailed, PenstockError
from workers.job import Job
from workers.jobs import JobBook
from workers.operations import operation_of
from workers.queue import WorkQueue

log = logging.getLogger(__name__)

CHUNK_ITEMS = 128


class Preparer:
    """A small pool of preparing threads in front of the queue."""

    def __init__(self, work: WorkQueue, book: JobBook, threads: int) -> None:
        self._work, self._book = work, book
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"prepare-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Prepare this job soon."""
        self._jobs.put(job)

    def close(self) -> None:
        """Stop the threads after what they are doing now."""
        for _ in self._threads:
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.prepare(job)

    def prepare(self, job: Job) -> None:
        """Prepare this job in the calling thread; a failure ends the job."""
        try:
            self._prepare(job)
        except PenstockError as error:
            self._book.fail(job, error)
        except Exception:
            log.exception("preparing failed for request %s", job.request_id)
            self._book.fail(job, InferenceFailed("the input could not be prepared for this model"))

    def _prepare(self, job: Job) -> None:
        operation = operation_of(job.call)
        total = len(job.prepared)
        tokens = 0
        for start in range(0, total, CHUNK_ITEMS):
            if job.state != "open":
                return
            began = time.monotonic_ns()
            stop = min(start + CHUNK_ITEMS, total)
            job.prepared[start:stop] = operation.prepare(job.adapter, job.call, start, stop)
            tokens += sum(item.cost for item in job.prepared[start:stop])
            job.prepare_ns += time.monotonic_ns() - began
            if stop == total:
                self._book.correct(job, tokens)
            self._work.put(job, start, stop)
