"""What the device thread does now, and whether its step lasts so long that the thread counts as hung.

A step that runs is not a hang: any step may take `worker.hang_timeout_s`, however short the steps of its model were
before. A step that nobody waits for that long may take as long as its last request, but `LEAST_STEP_S` in any case, so
that no client ends a worker with a short deadline. Five times the time predicted for a batch only lengthens its limit;
a model that has not run yet gets ten seconds as its prediction, and more for what is long. A step of a batch in
several, the first too where parts are known beforehand, gets its share of that limit, but never less than any step.

A process that is stopped or stuck is noticed elsewhere: it sends no heartbeats (`workers.supervisor.process`). The
unexpected end of a vital thread ends the process: a worker without it would look alive and answer nothing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable

from ipc import logs

log = logging.getLogger(__name__)

EXIT_BUG = 70

PREDICTION_FACTOR = 5.0
UNKNOWN_S = 10.0
UNKNOWN_TOKENS_PER_S = 200.0
"""A slow model on a slow processor."""
LEAST_STEP_S = 20.0


def batch_limit_s(
    hang_timeout_s: float, predicted_s: float, tokens: int = 0, awaited_s: float = math.inf
) -> float:
    """Seconds that a batch of `tokens` may take; `predicted_s` is 0 when nothing is known.

    `awaited_s` is the time until the last deadline of its requests.
    """
    unknown_s = max(UNKNOWN_S, tokens / UNKNOWN_TOKENS_PER_S)
    longest_s = min(hang_timeout_s, max(LEAST_STEP_S, awaited_s))
    return max(longest_s, PREDICTION_FACTOR * (predicted_s or unknown_s))


class Activity:
    """Set by the device thread, read by the endpoint's thread."""

    def __init__(self, floor_s: float = 0.0) -> None:
        """Nothing may take less than `floor_s`, steps included."""
        self._since = 0.0
        self._limit_s = self._step_limit_s = 0.0
        self._least_s = max(LEAST_STEP_S, floor_s)

    @property
    def busy(self) -> bool:
        """Whether something runs."""
        return bool(self._since)

    @property
    def limit_s(self) -> float:
        """What was allowed to what runs, or ran last."""
        return self._limit_s

    @property
    def running_s(self) -> float:
        """For how long the present step runs; 0 when nothing does."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def begin(self, limit_s: float) -> None:
        """Something begins that may take `limit_s` seconds."""
        self._limit_s = self._step_limit_s = limit_s
        self._since = time.monotonic()

    def renew(self, share: float = 1.0) -> None:
        """A step of what runs is done, and the next one is this share of the whole: its limit counts from now."""
        if self._since:
            self._step_limit_s = min(self._limit_s, max(self._least_s, share * self._limit_s))
            self._since = time.monotonic()

    def end(self) -> None:
        """It is over."""
        self._since = 0.0

    def overdue(self) -> bool:
        """Whether what runs now is past its limit."""
        return self.running_s > self._step_limit_s


def vital_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """A daemon thread (not started) that runs `body`; anything that escapes it ends the process with code 70."""

    def run() -> None:
        try:
            body()
        except BaseException:
            log.critical("the %s thread failed; this process ends", name, exc_info=True)
            logs.flush()
            os._exit(EXIT_BUG)

    return threading.Thread(target=run, name=name, daemon=True)
