"""Answers of models with `preserve_ordering` leave in the order in which their requests came.

An answer that is ready before an earlier one waits for it. What has no answer (a cancelled request) holds nobody up,
and every request ends by its deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from workers.adapters.base import Adapter
from workers.scheduling.job import Job

Send = Callable[[], None]


class ResponseOrder:
    """One line of open requests for each instance that wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: WeakKeyDictionary[Adapter, dict[Job, Send | None]] = WeakKeyDictionary()

    def enter(self, job: Job) -> None:
        """A request has come."""
        config = job.adapter.config if job.adapter is not None else None
        if config is None or config.dynamic_batching is None or not config.dynamic_batching.preserve_ordering:
            return
        with self._lock:
            self._lines.setdefault(job.adapter, {})[job] = None
            job.ordered = True

    def answer(self, job: Job, send: Send) -> None:
        """Send the answer of a request now or, if earlier ones have none yet, after theirs. `send` must not wait."""
        if not job.ordered:
            send()
            return
        with self._lock:
            line = self._lines[job.adapter]
            line[job] = send
            while line:
                first = next(iter(line))
                ready = line[first]
                if ready is None:
                    return
                del line[first]
                ready()

    def withdraw(self, job: Job) -> None:
        """A request ended without an answer."""
        self.answer(job, _nothing)


def _nothing() -> None:
    pass
