"""The one line of jobs that lack something, each with its reason.

| reason | the job lacks | looked at |
|---|---|---|
| SLOT | a slot of its model for its sequence, before it may hold room | when a lease ends, every tick |
| COPY | room for a private copy of its client's shared memory | the same |
| ROOM | room in the arena for its result | the same |
| PART | room in the arena for the next part of its answer | the same |
| PAUSE | time: its model asked to go on later | when the time has come |

Jobs of one reason keep their order. A job that ended meanwhile stays in the line until somebody looks at it.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from workers.scheduling.job import Job


class Reason(enum.Enum):
    """What a waiting job lacks."""

    SLOT = enum.auto()
    COPY = enum.auto()
    ROOM = enum.auto()
    PART = enum.auto()
    PAUSE = enum.auto()


class WaitingLine:
    """Any thread may call these."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Job, tuple[Reason, int]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, reason: Reason, until_ns: int = 0) -> None:
        """At the end; with PAUSE, until that instant."""
        with self._lock:
            self._jobs[job] = (reason, until_ns)

    def has(self, reason: Reason) -> bool:
        """Whether some open job waits for this reason."""
        with self._lock:
            return any(why is reason and job.state == "open" for job, (why, _) in self._jobs.items())

    def holds(self, job: Job) -> bool:
        """Whether the job waits here."""
        return job in self._jobs

    def jobs(self, *reasons: Reason) -> list[Job]:
        """The open jobs that wait for one of these reasons."""
        with self._lock:
            return [job for job, (why, _) in self._jobs.items() if why in reasons and job.state == "open"]

    def take(self, *reasons: Reason) -> list[Job]:
        """The same, and out of the line with them."""
        return self._take(lambda why, _: why in reasons)

    def next_ns(self) -> int | None:
        """When the first pause of an open job ends; None without any."""
        if not self._jobs:
            return None
        with self._lock:
            ends = [
                until
                for job, (why, until) in self._jobs.items()
                if why is Reason.PAUSE and job.state == "open"
            ]
        return min(ends, default=None)

    def take_paused(self, now_ns: int) -> list[Job]:
        """The open jobs whose pause has ended, and out of the line with them."""
        return self._take(lambda why, until: why is Reason.PAUSE and until <= now_ns)

    def _take(self, wanted: Callable[[Reason, int], bool]) -> list[Job]:
        if not self._jobs:
            return []
        with self._lock:
            taken = [job for job, (why, until) in self._jobs.items() if wanted(why, until)]
            gone = [job for job in self._jobs if job.state != "open"]
            for job in {*taken, *gone}:
                del self._jobs[job]
        return [job for job in taken if job.state == "open"]
