"""Score: how well each item answers the query."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from ipc.wire.messages import InputItem, ScoreCall
from workers.adapters.base import Adapter, ItemFailure, Prepared
from workers.memory.payload import Payload
from workers.operations.results import Part, Results


class Score:
    """One float32 per item."""

    name = "score"
    itemized = True
    refuses = False
    on_device = True

    def check(self, adapter: Adapter, call: ScoreCall) -> None:
        """Nothing beyond what the adapter checks."""

    def group(self, call: ScoreCall) -> Hashable:
        """All pairs of a model share batches."""
        return None

    def instant(self, call: ScoreCall) -> bool:
        """Tokenizing takes its time."""
        return False

    def needs_prepared(self, call: ScoreCall) -> bool:
        """One score per item, whatever it holds."""
        return False

    def layout(self, adapter: Adapter, call: ScoreCall, prepared: Sequence[Prepared]) -> list[Part]:
        """float32 [items]."""
        return [Part("score", "float32", (len(call.items),))]

    def prepare(
        self, adapter: Adapter, call: ScoreCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Pairs of the query and each item; items with a text of their own before them have that text as query."""
        prepared: list[Prepared | ItemFailure] = []
        for first, group in groupby(call.items[start:stop], key=lambda item: item.first):
            items = list(group)
            if first is None:
                prepared += adapter.prepare(items, call)
                continue
            place = start + len(prepared)
            names = replace(call.names, query=call.names.query.format(place))
            prepared += adapter.prepare(items, replace(call, query=InputItem(first), names=names))
        return prepared

    def run(self, adapter: Adapter, batch: Any, call: ScoreCall) -> Results:
        """One forward pass over pairs."""
        return Results(rows={"score": adapter.scored(batch, call)})
