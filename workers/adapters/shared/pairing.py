"""Scores of families that encode query and documents apart and compare them afterwards.

1. `prepare` turns a score call into its two sides, each prepared as the family prepares items to encode.
2. `collate` finds the distinct queries of a batch, puts the pairs of each next to each other, and lays out all queries
   and then all documents as one batch of the family: a query with twenty documents is encoded once.
3. `score` is the family's: it encodes that batch and compares.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ipc.errors import from_code
from ipc.wire.messages import Call, EncodeCall, InputItem, ScoreCall
from workers.adapters.base import Adapter, ItemFailure, Prepared

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document, each prepared alone; pairs of one request share the query. `extra` is the family's."""

    query: Prepared
    document: Prepared
    extra: Any = None


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Pairs laid out for the device, ordered by their query.

    sides          the family's batch: the distinct queries, then one document per pair
    owners         int64 [pairs], the query of each pair, ascending
    query_rows     int64 [queries], token vectors of each query
    document_rows  int64 [pairs], token vectors of each document
    extras         `Pair.extra` of each pair
    restore        int64 [pairs]: the pair given as number i is number restore[i] here
    """

    sides: Any
    owners: Int64Array
    query_rows: Int64Array
    document_rows: Int64Array
    extras: Sequence[Any]
    restore: Int64Array

    def given_order(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of the pairs, fp32 [pairs], in the order in which they were given."""
        return scores.index_select(0, torch.from_numpy(self.restore).to(scores.device))


class PairedAdapter(Adapter):
    """Base of these families; it stands before the base that has their `collate`."""

    @abstractmethod
    def sides(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Items made ready to encode, as `Adapter.prepare`; for pairs they are queries or documents of the call."""

    def extra_of(self, call: ScoreCall) -> Any:
        """What the family keeps with each pair of a call."""
        return None

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Items to encode as they are; items to score as pairs that share their query.

        An instruction goes to the query only. Raises the failure of a query that cannot be prepared.
        """
        if not isinstance(call, ScoreCall):
            return self.sides(items, call)
        [query] = self.sides([call.query], _side(call, is_query=True))
        if isinstance(query, ItemFailure):
            raise from_code(query.code, f"query: {query.message}")
        extra = self.extra_of(call)
        documents = self.sides(items, _side(call, is_query=False))
        return [
            document if isinstance(document, ItemFailure) else _joined(query, document, extra)
            for document in documents
        ]

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """The family's batch of items to encode, or a `PairBatch`."""
        if not isinstance(prepared[0].payload, Pair):
            return super().collate(prepared)  # type: ignore[safe-super]
        pairs: list[Pair] = [item.payload for item in prepared]
        queries: dict[int, Prepared] = {id(pair.query): pair.query for pair in pairs}
        numbers = {key: number for number, key in enumerate(queries)}
        owners = np.array([numbers[id(pair.query)] for pair in pairs], dtype=np.int64)
        order = np.argsort(owners, kind="stable")
        ordered = [pairs[at] for at in order]
        sides = [*queries.values(), *(pair.document for pair in ordered)]
        rows = np.array([side.rows for side in sides], dtype=np.int64)
        restore = np.empty_like(order)
        restore[order] = np.arange(order.size)
        return PairBatch(
            super().collate(sides),  # type: ignore[safe-super]
            owners[order],
            rows[: len(queries)],
            rows[len(queries) :],
            [pair.extra for pair in ordered],
            restore,
        )

    def padding_ratio(self, batch: Any) -> float:
        """As the family's, of all that is encoded."""
        return super().padding_ratio(batch.sides if isinstance(batch, PairBatch) else batch)


def _side(call: ScoreCall, *, is_query: bool) -> EncodeCall:
    """One side of a score call, as a call to encode it."""
    if not is_query:
        return EncodeCall([], [], None, False, call.options, call.overflow, call.lora)
    # NOTE: a query in several windows would count its special tokens once for each.
    overflow = "truncate" if call.overflow == "chunk" else call.overflow
    return EncodeCall([], [], call.instruction, True, call.options, overflow, call.lora)


def _joined(query: Prepared, document: Prepared, extra: Any) -> Prepared:
    excess = document.excess
    if query.truncated:
        excess = query.excess and replace(query.excess, in_query=True)
    truncated, cost = query.truncated or document.truncated, query.cost + document.cost
    return Prepared(Pair(query, document, extra), cost, truncated, excess=excess)
