"""Scores of families that encode query and documents apart, and MaxSim.

1. `prepare` turns a score call into queries and documents, each prepared as an item to encode.
2. `collate` puts the pairs of each distinct query next to each other, and lays out all queries and then all documents
   as one batch of the family: a query with twenty documents is encoded once.
3. `score` of the family encodes that batch and compares.

MaxSim of a query and a document: sum over query tokens q of max over document tokens d of q . d (ColBERT, arXiv
2004.12832, section 3.3). Pairs are ordered by query and cut into slices. In each slice one matrix product multiplies
all document tokens with the tokens of all queries of the slice; products with another pair's query are not summed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ipc.errors import from_code
from ipc.wire.messages import Call, EncodeCall, InputItem, ScoreCall
from workers.adapters.base import Adapter, ItemFailure, Prepared, SparseRows

Int64Array = npt.NDArray[np.int64]


SLICE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Most products of a slice: few enough for a processor's cache, and enough to keep a GPU busy in 256 MiB."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document, each prepared alone; pairs of one request share the query.

    `extra` holds options for the comparison, in the family's form.
    """

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
    """Base of these families. Name it before the base that collates items to encode."""

    @abstractmethod
    def sides(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """`Adapter.prepare` of items to encode, which in a score call are its query or its documents."""

    def extra_of(self, call: ScoreCall) -> Any:
        """`Pair.extra` for the pairs of a call."""
        return None

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Prepare items to encode, or pairs that share their query. An instruction goes to the query only.

        Raises the failure of a query that cannot be prepared.
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

    def ids_of(self, payload: Any) -> Sequence[Any]:
        """Those of an item to encode, or of query and document."""
        if not isinstance(payload, Pair):
            return super().ids_of(payload)
        return [*super().ids_of(payload.query.payload), *super().ids_of(payload.document.payload)]

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
        """Share of padding in the encoded queries and documents."""
        return super().padding_ratio(batch.sides if isinstance(batch, PairBatch) else batch)


def _side(call: ScoreCall, *, is_query: bool) -> EncodeCall:
    """One side of a score call, as a call to encode it."""
    drop = ("max_tokens", "prompt_name") if is_query else ("prompt_name",)
    options = {name: value for name, value in call.options.items() if name not in drop}
    if not is_query:
        return EncodeCall([], [], None, False, options, call.overflow, call.lora)
    # NOTE: a query in several windows would count its special tokens once for each.
    overflow = "truncate" if call.overflow == "chunk" else call.overflow
    return EncodeCall([], [], call.instruction, True, options, overflow, call.lora)


def _joined(query: Prepared, document: Prepared, extra: Any) -> Prepared:
    excess = document.excess
    if query.truncated:
        excess = query.excess and replace(query.excess, in_query=True)
    truncated, cost = query.truncated or document.truncated, query.cost + document.cost
    return Prepared(Pair(query, document, extra), cost, truncated, excess=excess)


class Slice(NamedTuple):
    """Pairs `first` to `last` (excluded) and their queries `query` to `query_end` (excluded)."""

    first: int
    last: int
    query: int
    query_end: int


def slices(
    owners: Int64Array, query_rows: Int64Array, document_rows: Int64Array, elements: int
) -> Iterator[Slice]:
    """Cut pairs, ordered by query, into slices of at most `elements` products: document tokens x query tokens.

    A pair of more products is a slice of its own, and `max_sim` compares such a pair piece by piece.
    """
    queries = np.concatenate(([0], np.cumsum(query_rows))).tolist()
    documents = np.concatenate(([0], np.cumsum(document_rows))).tolist()
    owner_of = owners.tolist()
    first = 0
    for at in range(1, len(owner_of) + 1):
        if at < len(owner_of):
            width = queries[owner_of[at] + 1] - queries[owner_of[first]]
            if width * (documents[at + 1] - documents[first]) <= elements:
                continue
        yield Slice(first, at, owner_of[first], owner_of[at - 1] + 1)
        first = at


def max_sim(vectors: torch.Tensor, batch: PairBatch) -> torch.Tensor:
    """fp32 [pairs], in the batch's order, on the device of `vectors`.

    `vectors`, fp32 [rows, width], are the token vectors of all queries and then of all documents.
    """
    device = vectors.device
    of_queries, of_documents = vectors.split(
        [int(batch.query_rows.sum()), int(batch.document_rows.sum())], dim=0
    )
    starts = np.concatenate(([0], np.cumsum(batch.query_rows)))
    rows = np.concatenate(([0], np.cumsum(batch.document_rows)))
    lengths = torch.from_numpy(batch.document_rows).to(device)
    owners = torch.from_numpy(batch.owners).to(device)
    askers = torch.from_numpy(np.repeat(np.arange(len(batch.query_rows)), batch.query_rows)).to(device)
    limit = SLICE_ELEMENTS.get(device.type, SLICE_ELEMENTS["cuda"])
    scores = []
    for first, last, query, query_end in slices(batch.owners, batch.query_rows, batch.document_rows, limit):
        columns = slice(int(starts[query]), int(starts[query_end]))
        matched, asking = of_documents[rows[first] : rows[last]], of_queries[columns]
        if last - first == 1 and len(matched) * len(asking) > limit:
            pieces = matched.split(max(1, limit // len(asking)))
            best = torch.stack([(piece @ asking.T).amax(dim=0) for piece in pieces]).amax(dim=0, keepdim=True)
        else:
            best = torch.segment_reduce(
                matched @ asking.T, "max", lengths=lengths[first:last], axis=0, unsafe=True
            )
        counted = (askers[columns] == owners[first:last, None]) & (lengths[first:last, None] > 0)
        scores.append(torch.where(counted, best, 0.0).sum(dim=1))
    return torch.cat(scores)


class LateInteraction(PairedAdapter):
    """Base of the families whose score is MaxSim over their `multivector` output."""

    @torch.inference_mode()
    def score(self, batch: PairBatch) -> torch.Tensor:
        """fp32 [pairs] on the device."""
        vectors = self.encode(batch.sides, frozenset({"multivector"}))["multivector"]
        assert not isinstance(vectors, SparseRows)
        return batch.given_order(max_sim(vectors, batch))
