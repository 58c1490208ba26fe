"""Counts of a bridge under the names of SIE's worker: what came from the queue, how long it waited, what became of it.

Labels name models of the box alone; any other name that an item has counts as `UNKNOWN`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container
from functools import lru_cache

from ipc.metrics.cluster import BridgeMetrics, ConfigResult
from ipc.metrics.families import UNKNOWN
from ipc.metrics.registry import Amount, Observations

OPERATIONS = ("encode", "score", "extract", "infer", "tokenize")


class Meter:
    """Feeds the families of one bridge."""

    def __init__(self, metrics: BridgeMetrics, models: Container[str]) -> None:
        """`models` has all names of models of this box."""
        self._metrics, self._models = metrics, models
        self._fetched: Counter[str] = Counter()
        self._child = lru_cache(maxsize=4096)(self._made)
        self.received = metrics.tally.amount(metrics.received)
        self.acked = metrics.tally.amount(metrics.acked)
        self.naked = metrics.tally.amount(metrics.naked)
        self.inflight = metrics.tally.amount(metrics.inflight)

    def untold(self, count: int) -> None:
        """So many models have entries that are too large to tell gateways."""
        self._metrics.untold.set(count)

    def config_message(self, result: ConfigResult) -> None:
        """What became of a message about a configuration."""
        self._metrics.config_messages.labels(result).inc()

    def _made(self, family: str, *labels: str) -> Observations:
        return self._metrics.tally.observations(getattr(self._metrics, family).labels(*labels))

    def _name(self, model: str) -> str:
        return model if model in self._models else UNKNOWN

    def delivered(self, model: str, waited_s: float) -> None:
        """The queue has brought an item, where the item was for so long."""
        model = self._name(model)
        self.received.inc()
        self._child("waited", model).observe(waited_s)
        if not self._fetched:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._fetched[model] += 1

    def _end_turn(self) -> None:
        fetched, self._fetched = self._fetched, Counter()
        for model, count in fetched.items():
            self._child("fetched", model).observe(count)

    def settled(self, *, given_back: bool) -> None:
        """The queue hears that a delivery is done, or that another box shall have the item."""
        (self.naked if given_back else self.acked).inc()

    def ended(self, model: str, operation: str, seconds: float) -> None:
        """The answer to an item leaves, so long after the item came."""
        known = operation if operation in OPERATIONS else UNKNOWN
        self._child("processed", self._name(model), known).observe(seconds)

    def lacks(self, model: str) -> None:
        """An item was refused, since this box does not have its model."""
        self._counted("unloaded", self._name(model)).inc()

    def loads(self, model: str) -> None:
        """An item needs a model that no worker has loaded."""
        self._counted("loads", self._name(model)).inc()

    def disagrees(self, model: str) -> None:
        """The producer of an item has other configurations than this box."""
        self._counted("mismatches", self._name(model)).inc()

    def _counted(self, family: str, model: str) -> Amount:
        return self._metrics.tally.amount(getattr(self._metrics, family).labels(model))
