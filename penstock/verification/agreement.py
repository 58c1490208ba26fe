"""How well two sets of results agree: cosines of vectors, order of scores, and findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

Vectors = Sequence[np.ndarray[Any, Any]]


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One output compared.

    closest     worst cosine over all items; for scores and findings 1 - the largest difference
    mean        the same, on average
    rank        Kendall's tau of the order of documents over all queries; for findings the share that both sides have
    """

    output: str
    items: int
    closest: float
    mean: float
    rank: float
    least_closest: float
    least_rank: float

    @property
    def fine(self) -> bool:
        """Whether both limits are kept."""
        return self.closest >= self.least_closest and self.rank >= self.least_rank


def cosines(ours: Vectors, theirs: Vectors) -> np.ndarray[Any, Any]:
    """Worst cosine per item, float64 [items].  An item is a vector [dims] or token vectors [tokens, dims].

    Items of another shape count as -1, two zero vectors as 1.
    """
    return np.array([_cosine(a, b) for a, b in zip(ours, theirs, strict=True)])


def _cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    if a.shape != b.shape:
        return -1.0
    x, y = (np.atleast_2d(v).astype(np.float64) for v in (a, b))
    lengths = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    products = (x * y).sum(axis=1)
    zero = (np.abs(x).sum(axis=1) == 0) & (np.abs(y).sum(axis=1) == 0)
    found = np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1.0), np.where(zero, 1.0, 0.0))
    return float(found.min(initial=1.0))


def similarities(queries: Vectors, documents: Vectors, similarity: str) -> np.ndarray[Any, Any]:
    """Scores [queries, documents] by "cosine", "dot" or "maxsim"."""
    if similarity == "maxsim":
        return np.array([[(q @ d.T).max(axis=1).sum() for d in documents] for q in queries])
    left, right = np.stack(queries), np.stack(documents)
    if similarity == "cosine":
        left, right = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (left, right))
    scores: np.ndarray[Any, Any] = left @ right.T
    return scores


def kendall(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], tie: float) -> float:
    """Kendall's tau over the rows of two score tables [queries, documents].

    Pairs of documents whose reference scores differ by at most `tie` have no order and do not count.
    """
    left, right = (table[:, :, None] - table[:, None, :] for table in (ours, theirs))
    ordered = np.abs(right) > tie
    if not ordered.any():
        return 1.0
    return float(np.where(np.sign(left) == np.sign(right), 1.0, -1.0)[ordered].mean())
