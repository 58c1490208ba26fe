"""Extract: entities, relations, classes, objects or documents found in each item."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ipc.wire import extraction
from ipc.wire.extraction import Extraction
from ipc.wire.messages import ExtractCall
from workers.adapters.base import Adapter, ItemFailure, Prepared
from workers.memory.payload import Payload
from workers.operations.results import Part, Results


class Extract:
    """Structured findings, written as msgpack per item."""

    name = "extract"
    itemized = True
    refuses = False
    on_device = True

    def check(self, adapter: Adapter, call: ExtractCall) -> None:
        """Nothing beyond what the adapter checks."""

    def group(self, call: ExtractCall) -> Hashable:
        """Whatever separates batches is the adapter's to say."""
        return None

    def instant(self, call: ExtractCall) -> bool:
        """Tokenizing takes its time."""
        return False

    def needs_prepared(self, call: ExtractCall) -> bool:
        """Findings come loose."""
        return False

    def layout(self, adapter: Adapter, call: ExtractCall, prepared: Sequence[Prepared]) -> list[Part]:
        """Nothing has a size known beforehand."""
        return []

    def prepare(
        self, adapter: Adapter, call: ExtractCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Tokens, words, pixels: what the family reads."""
        return adapter.prepare(call.items[start:stop], call)

    def run(self, adapter: Adapter, batch: Any, call: ExtractCall) -> Results:
        """One forward pass and the reading of what it says."""
        results = Results()
        packed: list[np.ndarray] = []
        for at, found in enumerate(adapter.extract(batch)):
            if isinstance(found, ItemFailure):
                results.failures[at] = found
                found = Extraction()
            packed.append(np.frombuffer(extraction.pack(found), dtype=np.uint8))
        results.loose["extraction"] = packed
        return results
