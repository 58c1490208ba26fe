"""How a kind of job takes its turns on the device: one batch, a step of a sequence, parts of a stream.

The runtime imports this package.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.adapters.base import Adapter
from workers.scheduling.context import Context
from workers.scheduling.job import Strategy
from workers.strategies.generation import Generations
from workers.strategies.one_shot import OneShot
from workers.strategies.sequence import Sequences
from workers.strategies.stream import Streams


class Kinds:
    """One strategy for each kind of job of a worker."""

    def __init__(self, context: Context, unload_idle: Callable[[str, float], bool]) -> None:
        """`unload_idle`: see `one_shot.Eviction`."""
        self.one_shot = OneShot(context, unload_idle)
        self.sequences = Sequences(context, unload_idle)
        self.streams = Streams(context)
        self.generations = Generations(context)

    def of(self, adapter: Adapter, *, on_device: bool = True) -> Strategy:
        """The strategy of a job of a model; a job that ends before the device (`on_device`) is one batch."""
        if not on_device:
            return self.one_shot
        if adapter.engine is not None:
            return self.generations
        if adapter.streams:
            return self.streams
        if adapter.config is not None and adapter.config.sequence_batching is not None:
            return self.sequences
        return self.one_shot
