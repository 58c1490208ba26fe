"""Generate: one prompt to any number of choices of text, sent as the choices grow."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ipc.wire.messages import GenerateCall
from workers.adapters.base import Adapter, ItemFailure, Prepared
from workers.generation.request import GenerationRequest
from workers.memory.payload import Payload
from workers.operations.results import Part, Results


class Generate:
    """Text leaves by messages of its own (`workers.strategies.generation`); the result that ends it has no tensors."""

    name = "generate"
    itemized = False
    refuses = False
    on_device = True

    def check(self, adapter: Adapter, call: GenerateCall) -> None:
        """Nothing beyond what the adapter checks."""

    def group(self, call: GenerateCall) -> Hashable:
        """All sequences of a model share the steps of its engine."""
        return None

    def instant(self, call: GenerateCall) -> bool:
        """Rendering a template takes its time."""
        return False

    def needs_prepared(self, call: GenerateCall) -> bool:
        """There is nothing to reserve."""
        return False

    def layout(self, adapter: Adapter, call: GenerateCall, prepared: Sequence[Prepared]) -> list[Part]:
        """No tensors."""
        return []

    def prepare(
        self, adapter: Adapter, call: GenerateCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Render and tokenize the prompt, compile the grammar."""
        return adapter.prepare(call.items, call)

    def run(self, adapter: Adapter, batch: Any, call: GenerateCall) -> Results:
        """Generate for one request alone, from its begin to its end: float32 log probabilities of its tokens."""
        [request] = batch
        engine = adapter.engine
        assert isinstance(request, GenerationRequest)
        assert engine is not None
        found: list[float] = []
        engine.add(request)
        while engine.has_work:
            for emission in engine.step():
                found += [each.logprob for each in emission.logprobs or ()]
        return Results(loose={"logprobs": [np.array(found, dtype=np.float32)]})
