"""Jobs that wait to be prepared: queries before bulk work, which gets a turn now and then however many queries come.

Jobs whose next text is long stand apart: they get every second turn of bulk work, and none on a thread that is kept for
short ones: when their turn comes to that thread, the next other one makes up for it.
"""

from __future__ import annotations

import threading
from collections import deque

from workers.scheduling.job import Job

BULK_EVERY = 8
"""One turn in so many is bulk work's while both wait."""


class PreparingLine:
    """A queue with three lanes for several threads."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Job]] = {"interactive": deque(), "bulk": deque(), "long": deque()}
        self._changed = threading.Condition()
        self._turns = 0
        self._long_next = False
        self._owed = False
        """Whether the turn of a long job came to a thread that takes none."""
        self._closed = False

    def put(self, job: Job, is_long: bool = False) -> None:
        """At the end of the job's lane; `is_long` is said of what is prepared of it next."""
        with self._changed:
            self._lanes["long" if is_long else job.lane].append(job)
            # NOTE: a single thread that is woken might be the one that takes no long jobs.
            self._changed.notify_all() if is_long else self._changed.notify()

    def get(self, quick: bool = False) -> Job | None:
        """The next job, waited for, no long one if `quick`; None when the line is closed and there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting(quick))
            interactive, others = self._lanes["interactive"], self._others(quick)
            # NOTE: the turns of all threads count, and what this one may not take waits all the same.
            bulk, long = self._lanes["bulk"], self._lanes["long"]
            self._turns = self._turns + 1 if interactive and (bulk or long) else 0
            if others and (not interactive or self._turns >= BULK_EVERY or (self._owed and others is long)):
                self._turns = 0
                self._owed = bool(interactive and long and self._long_next) and others is bulk
                self._long_next = others is bulk
                return others.popleft()
            return interactive.popleft() if interactive else None

    def close(self) -> None:
        """`get` gives out what is there and then None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _waiting(self, quick: bool) -> bool:
        return bool(self._lanes["interactive"] or self._others(quick))

    def _others(self, quick: bool) -> deque[Job]:
        """Whose turn it is beside the queries."""
        bulk, long = self._lanes["bulk"], self._lanes["long"]
        return long if long and not quick and (self._long_next or not bulk) else bulk
