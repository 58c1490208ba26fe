"""Jobs that wait to be prepared: queries before bulk work, which gets a turn now and then however many queries come."""

from __future__ import annotations

import threading
from collections import deque

from workers.job import Job

BULK_EVERY = 8
"""One turn in so many is bulk work's while both wait."""


class PreparingLine:
    """A queue with two lanes for several threads."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Job]] = {"interactive": deque(), "bulk": deque()}
        self._changed = threading.Condition()
        self._turns = 0
        self._closed = False

    def put(self, job: Job) -> None:
        """At the end of the job's lane."""
        with self._changed:
            self._lanes[job.lane].append(job)
            self._changed.notify()

    def get(self) -> Job | None:
        """The next job, waited for; None when the line is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(self._lanes.values()))
            interactive, bulk = self._lanes["interactive"], self._lanes["bulk"]
            self._turns = self._turns + 1 if interactive and bulk else 0
            if bulk and (not interactive or self._turns % BULK_EVERY == 0):
                return bulk.popleft()
            return interactive.popleft() if interactive else None

    def close(self) -> None:
        """`get` gives out what is there and then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
