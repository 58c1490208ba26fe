"""Sparse vectors on the host: made from weights per token or per term of the vocabulary, cut, and multiplied."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from workers.adapters.base import SparseRows

Float32Array = npt.NDArray[np.float32]


def max_per_id(
    ids: npt.NDArray[np.int64],
    weights: Float32Array,
    owners: npt.NDArray[np.int64],
    items: int,
    dropped: npt.NDArray[np.bool_],
) -> SparseRows:
    """The largest weight of each token id in each item; ids in `dropped` [vocabulary] and weights of 0 are left out.

    ids, weights and owners (the item of each token) are [T].
    """
    kept = (weights > 0) & ~dropped[ids]
    keys = owners[kept] * len(dropped) + ids[kept]
    order = np.argsort(keys, kind="stable")
    keys, weights = keys[order], weights[kept][order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    values = np.maximum.reduceat(weights, starts) if starts.size else weights
    return _split(keys[starts] // len(dropped), keys[starts] % len(dropped), values, items)


def nonzero_terms(matrix: torch.Tensor) -> SparseRows:
    """The positive values of each row of fp32 [items, vocabulary]."""
    places = torch.nonzero(matrix > 0)
    values = matrix[places[:, 0], places[:, 1]].cpu().numpy()
    found = places.cpu().numpy()
    return _split(found[:, 0], found[:, 1], values, matrix.shape[0])


def strongest(indices: np.ndarray, values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The `limit` largest values of one sparse vector, still in ascending order of their indices."""
    if len(values) <= limit:
        return indices, values
    kept = np.sort(np.argpartition(values, len(values) - limit)[len(values) - limit :])
    return indices[kept], values[kept]


def paired_dots(
    queries: SparseRows, documents: SparseRows, owners: npt.NDArray[np.int64], vocabulary: int
) -> Float32Array:
    """float32 [pairs]: the dot product of each document with its query. `owners` is the query of each document."""

    def keys_of(rows: SparseRows, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        spread = np.repeat(numbers, [len(indices) for indices in rows.indices])
        return spread * vocabulary + np.concatenate(rows.indices)

    asked = keys_of(queries, np.arange(len(queries.indices)))
    if not asked.size:
        return np.zeros(len(owners), np.float32)
    found = keys_of(documents, owners)
    places = np.minimum(np.searchsorted(asked, found), asked.size - 1)
    shared = asked[places] == found
    products = np.concatenate(documents.values)[shared] * np.concatenate(queries.values)[places[shared]]
    pairs = np.repeat(np.arange(len(owners)), [len(indices) for indices in documents.indices])
    return np.bincount(pairs[shared], products, minlength=len(owners)).astype(np.float32)


def _split(owners: np.ndarray, ids: np.ndarray, values: np.ndarray, items: int) -> SparseRows:
    """Terms in the order of their items, cut into one pair of arrays per item."""
    cuts = np.cumsum(np.bincount(owners, minlength=items))[:-1]
    return SparseRows(np.split(ids.astype(np.int32), cuts), np.split(values, cuts))
