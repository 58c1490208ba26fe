"""The one line of jobs that lack something, each with its reason.

| reason | the job lacks | looked at |
|---|---|---|
| SLOT | a slot of its model for its sequence, before it may hold room | when a lease ends, every tick |
| COPY | room for a private copy of its client's shared memory | the same |
| ROOM | room in the arena for its result | the same |
| PART | room in the arena for the next part of its answer | the same |
| PAUSE | time: its model asked to go on later | when the time has come |

Jobs of one reason keep their order. A job that ended meanwhile stays in the line until somebody takes jobs of its
reason.
"""

from __future__ import annotations

import enum
import threading

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
        # PERF: the device thread asks for pauses at every batch, and must not look at thousands of other jobs.
        self._lines: dict[Reason, dict[Job, int]] = {reason: {} for reason in Reason}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, job: Job, reason: Reason, until_ns: int = 0) -> None:
        """At the end; with PAUSE, until that instant."""
        with self._lock:
            self._lines[reason][job] = until_ns

    def has(self, reason: Reason) -> bool:
        """Whether some open job waits for this reason."""
        with self._lock:
            return any(job.state == "open" for job in self._lines[reason])

    def holds(self, job: Job) -> bool:
        """Whether the job waits here."""
        return any(job in line for line in self._lines.values())

    def jobs(self, *reasons: Reason) -> list[Job]:
        """The open jobs that wait for one of these reasons, reason after reason."""
        with self._lock:
            return [job for reason in reasons for job in self._lines[reason] if job.state == "open"]

    def take(self, reason: Reason) -> list[Job]:
        """The open jobs that wait for this reason, and out of the line with them."""
        return self._take(reason, None)

    def next_ns(self) -> int | None:
        """When the first pause of an open job ends; None without any."""
        if not self._lines[Reason.PAUSE]:
            return None
        with self._lock:
            ends = [until for job, until in self._lines[Reason.PAUSE].items() if job.state == "open"]
        return min(ends, default=None)

    def take_paused(self, now_ns: int) -> list[Job]:
        """The open jobs whose pause has ended, and out of the line with them."""
        return self._take(Reason.PAUSE, now_ns)

    def _take(self, reason: Reason, until_ns: int | None) -> list[Job]:
        line = self._lines[reason]
        if not line:
            return []
        with self._lock:
            taken = [job for job, until in line.items() if until_ns is None or until <= until_ns]
            gone = [job for job in line if job.state != "open"]
            for job in {*taken, *gone}:
                del line[job]
        return [job for job in taken if job.state == "open"]
