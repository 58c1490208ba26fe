"""A child process of the supervisor that exists as numbers only."""

from __future__ import annotations

from workers.spare import Assignment


class FakeChild:
    """Has a pid and a pidfd, and keeps what the supervisor does to it. A dead one takes no assignment."""

    def __init__(self, number: int, code: int = -9) -> None:
        self.pid, self.pidfd = 1000 + number, number
        self.dead = False
        self._code = code
        self.assigned: list[Assignment] = []
        self.signals: list[int] = []
        self.waited = 0

    def assign(self, assignment: Assignment) -> None:
        """Raise `BrokenPipeError` as the pipe of a dead process does."""
        if self.dead:
            raise BrokenPipeError
        self.assigned.append(assignment)

    def signal(self, number: int) -> None:
        """Keep the number."""
        self.signals.append(number)

    def wait(self) -> int:
        """The exit code."""
        self.waited += 1
        return self._code
