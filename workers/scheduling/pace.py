"""How fast the device works: by model for the bound and the turns of the queue, in all for people who watch.

A batch takes a time of its own and a time for each token, so lone queries tell little about a full batch. `Pace` keeps
both parts apart by least squares over recent batches.
"""

from __future__ import annotations

from collections import defaultdict

MEMORY_S = 2.0
"""Device time after which two thirds of what was known has been replaced."""
MOST_WEIGHT = 0.5
"""Of one batch, however long it took."""
MOMENT_S = 1e-6
"""A shorter batch says nothing."""
OUTLIER = 4.0
"""A batch counts as at most so many times the time that was predicted."""
SPREAD = 0.1
"""Batches whose sizes differ less, as a part of their mean, do not tell the two parts apart."""
EXTRAPOLATED = 4.0
"""Before a batch was full, full batches count as at most so many times as large as the batches that ran."""


class DrainRate:
    """Tokens per second of device time, smoothed over recent batches."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """One batch of `tokens` took `seconds` of device time."""
        if seconds <= 0:
            return
        rate = tokens / seconds
        # A large batch says more about throughput than a lone query does.
        weight = min(0.3, 0.02 + tokens / 20000)
        self.tokens_per_s += (rate - self.tokens_per_s) * (weight if self.tokens_per_s else 1.0)

    def seconds_for(self, tokens: int) -> float:
        """Predicted device time."""
        return tokens / self.tokens_per_s if self.tokens_per_s else 0.0


class Pace:
    """Device time of the batches of one model: `batch_s` for a batch, `token_s` for each token of it.

    `per_token_s` is the time for a token where batches are as full as they are under load, with `full_tokens`: fewer
    than the budget where items, turns or options bound a batch, and 0 before a batch was full.
    """

    def __init__(self) -> None:
        self.batch_s = self.token_s = self.per_token_s = self.full_tokens = 0.0
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._full_weight = 0.0

    def record(self, tokens: int, seconds: float, full: bool = False) -> None:
        """A batch of `tokens` took `seconds` of device time. `full`: work that could not join it was left waiting."""
        if seconds < MOMENT_S or tokens <= 0:
            return
        if self._weight:
            seconds = max(MOMENT_S, min(seconds, OUTLIER * self.seconds_for(tokens)))
        weight = min(MOST_WEIGHT, seconds / MEMORY_S)
        if full:
            self._full_weight += weight * (1 - self._full_weight)
            self.full_tokens += weight / self._full_weight * (tokens - self.full_tokens)
        self._forget(1 - weight)
        self._weight += weight
        self._tokens += weight * tokens
        self._seconds += weight * seconds
        self._squares += weight * tokens * tokens
        self._products += weight * tokens * seconds
        self._fit()

    def _forget(self, kept: float) -> None:
        self._weight *= kept
        self._tokens *= kept
        self._seconds *= kept
        self._squares *= kept
        self._products *= kept

    def _fit(self) -> None:
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        self.token_s = seconds / tokens
        if spread > (SPREAD * tokens) ** 2:
            slope = (self._products / self._weight - tokens * seconds) / spread
            self.token_s = min(self.token_s, max(0.0, slope))
        self.batch_s = seconds - self.token_s * tokens
        self.per_token_s = self.token_s + self.batch_s / (self.full_tokens or EXTRAPOLATED * tokens)

    def seconds_for(self, tokens: int) -> float:
        """Predicted device time of one batch."""
        return self.batch_s + self.token_s * tokens


class Paces:
    """The pace of each model, by its name."""

    def __init__(self) -> None:
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)

    def record(self, model: str, tokens: int, seconds: float, full: bool = False) -> None:
        """See `Pace.record`."""
        self._paces[model].record(tokens, seconds, full)

    def per_token_s(self, model: str) -> float:
        """Seconds for a token in full batches; 0 for a model that has not run yet."""
        pace = self._paces.get(model)
        return pace.per_token_s if pace else 0.0

    def full_tokens(self, model: str) -> float:
        """Tokens of full batches as they were lately; 0 before the first."""
        pace = self._paces.get(model)
        return pace.full_tokens if pace else 0.0

    def tokens_per_s(self, model: str) -> float:
        """Tokens a second in full batches; 0 for a model that has not run yet."""
        seconds = self.per_token_s(model)
        return 1 / seconds if seconds else 0.0

    def seconds_for(self, model: str, tokens: int) -> float:
        """Predicted device time of one batch; 0 for a model that has not run yet."""
        pace = self._paces.get(model)
        return pace.seconds_for(tokens) if pace else 0.0

    def models(self) -> list[str]:
        """The models that have run."""
        return list(self._paces)
