"""MaxSim: each token vector of a query finds its best match among a document's, and the matches are added up.

sum over query tokens q of max over document tokens d of q . d   (ColBERT, arXiv 2004.12832, section 3.3)

Pairs come ordered by their query. They are cut into slices, and in each slice one matrix product compares all document
tokens with the tokens of all queries of the slice; what belongs to another query is left out of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from workers.adapters.base import SparseRows
from workers.adapters.shared.pairing import Int64Array, PairBatch, PairedAdapter

SLICE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Products that one slice may hold: what stays in a processor's cache, and what keeps a GPU busy in 256 MiB."""


class Slice(NamedTuple):
    """Pairs `first` to `last` (excluded) and their queries `query` to `query_end` (excluded)."""

    first: int
    last: int
    query: int
    query_end: int


def slices(
    owners: Int64Array, query_rows: Int64Array, document_rows: Int64Array, elements: int
) -> Iterator[Slice]:
    """Cut pairs, ordered by their query, so that (document tokens) x (query tokens) of each slice is within `elements`.

    A pair that is larger alone has a slice of its own, which is compared piece by piece.
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
    found = []
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
        found.append(torch.where(counted, best, 0.0).sum(dim=1))
    return torch.cat(found)


class LateInteraction(PairedAdapter):
    """Base of the families whose score is MaxSim over their `multivector` output."""

    @torch.inference_mode()
    def score(self, batch: PairBatch) -> torch.Tensor:
        """fp32 [pairs] on the device."""
        vectors = self.encode(batch.sides, frozenset({"multivector"}))["multivector"]
        assert not isinstance(vectors, SparseRows)
        return batch.given_order(max_sim(vectors, batch))
