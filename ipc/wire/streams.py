"""Streamed results: structs of the parts that come before the final result of a request, and their flow control.

1. A request with `Work.parts` above 0 is answered with any number of `Part`s and then a `Result` or a `Failure`.
2. The frontend says with `PartsConsumed` how many parts its client has had. The worker makes at most `Work.parts` more
   than that, and nothing ahead of a part in a block: a client that does not read holds one block at most.
"""

from __future__ import annotations

from collections import deque

from ipc.wire.messages import Result, Wire

WINDOW = 8
"""Parts that a frontend asks to be sent ahead."""
MAX_WINDOW = 64


class Part(Wire, frozen=True, tag="part"):
    """One part of the answer to the request `result.id`, which goes on. Its tensors lie as in any result."""

    result: Result


class PartsConsumed(Wire, frozen=True, tag="parts_consumed"):
    """The oldest `count` parts of request `id` that were not taken yet are taken."""

    id: int
    count: int


class PartFlow:
    """What either side knows of one request: parts that were sent and not taken yet. Its owner locks, if need be."""

    __slots__ = ("_untaken", "_window")

    def __init__(self, window: int) -> None:
        """The frontend asks for `window` parts; at most `MAX_WINDOW` are granted."""
        self._window = max(1, min(window, MAX_WINDOW))
        self._untaken: deque[bool] = deque()

    @property
    def open(self) -> bool:
        """Whether one more part may be sent."""
        return len(self._untaken) < self._window and True not in self._untaken

    def sent(self, in_block: bool) -> None:
        """One more part was sent."""
        self._untaken.append(in_block)

    def taken(self, count: int) -> None:
        """The oldest parts were taken; a count beyond what was sent is cut."""
        for _ in range(min(max(count, 0), len(self._untaken))):
            self._untaken.popleft()
