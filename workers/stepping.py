"""Steps of a long computation on the device thread, such as writing a text token by token.

Each step tells the watchdog that the thread lives, so that its limit holds for a step and not for the whole, asks which
items nobody waits for any more, and lets queries of other models pass. Outside of a batch (the proof at load) steps do
nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from workers.job import Piece
from workers.watchdog import Activity


class Steps:
    """The steps of one batch."""

    def __init__(
        self,
        activity: Activity | None = None,
        pieces: Sequence[Piece] = (),
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._activity, self._pieces, self._between = activity, pieces, between

    def step(self) -> None:
        """One more step is done, and the next one has not begun: the device is free for a moment."""
        self._between()
        if self._activity is not None:
            self._activity.renew()

    def abandoned(self, place: int) -> bool:
        """Whether the item at this place of the batch is wanted no more: cancelled, failed, or past its deadline."""
        if place >= len(self._pieces):
            return False
        job = self._pieces[place].job
        return job.state != "open" or time.monotonic_ns() >= job.deadline_ns


_running = threading.local()
_OUTSIDE = Steps()


def current() -> Steps:
    """The steps of the batch that this thread runs."""
    found: Steps = getattr(_running, "steps", _OUTSIDE)
    return found


@contextlib.contextmanager
def running(
    activity: Activity, pieces: Sequence[Piece], between: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """This thread runs a batch of `pieces`, in this order; `between` is called between two of its steps."""
    before, _running.steps = current(), Steps(activity, pieces, between)
    try:
        yield
    finally:
        _running.steps = before
