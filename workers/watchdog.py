"""What the device thread does now, and whether it takes far longer than predicted.

The limit of a batch is the larger of `worker.hang_timeout_s` and five times the time predicted for its model; a model
that has not run yet gets ten seconds as its prediction, and more for what is long. A step of a batch in several, the
first too where parts are known beforehand, gets its share of that limit, but never less than ten seconds or
`worker.hang_timeout_s`.
"""

from __future__ import annotations

import time

PREDICTION_FACTOR = 5.0
UNKNOWN_S = 10.0
UNKNOWN_TOKENS_PER_S = 200.0
"""A slow model on a slow processor."""
LEAST_STEP_S = 10.0


def batch_limit_s(floor_s: float, predicted_s: float, tokens: int = 0) -> float:
    """Seconds that a batch of `tokens` may take; `predicted_s` is 0 when nothing is known."""
    unknown_s = max(UNKNOWN_S, tokens / UNKNOWN_TOKENS_PER_S)
    return max(floor_s, PREDICTION_FACTOR * (predicted_s or unknown_s))


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
        since = self._since
        return bool(since) and time.monotonic() - since > self._step_limit_s
