"""MUVERA: one vector of fixed width for the token vectors of a text (arXiv 2405.19504).

1. Per repetition, the signs of a token's products with random vectors name one of 2^k partitions (as a Gray code).
2. Token vectors of one partition are summed for queries, averaged for documents.
3. All partitions of all repetitions, side by side, are folded to the final width by a count sketch.

The random draws follow the reference implementation in numpy (`default_rng(seed + repetition)`; of the sketch first the
buckets, then the signs), so equal settings give equal vectors everywhere. They are drawn once per settings and width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from ipc.errors import InvalidInput

_MOST_VALUES = 1 << 24
_MOST_WORK = 1 << 30
_LIMITS = {
    "num_repetitions": (1, 128),
    "num_simhash_projections": (0, 12),
    "projection_dim": (1, 4096),
    "final_projection_dim": (1, 1 << 18),
    "seed": (0, (1 << 31) - 1),
}
_OPTIONAL = ("projection_dim", "final_projection_dim")


@dataclass(frozen=True, slots=True)
class Muvera:
    """Settings; the defaults are the contract's. `projection_dim` and `final_projection_dim` may be None for none."""

    num_repetitions: int = 40
    num_simhash_projections: int = 6
    projection_dim: int | None = None
    final_projection_dim: int | None = 10240
    seed: int = 42
    normalize: bool = False

    def inner_width(self, token_width: int) -> int:
        """Values before the final projection."""
        return self.num_repetitions * (self.projection_dim or token_width) << self.num_simhash_projections

    def width(self, token_width: int) -> int:
        """Values of the vector that stands for a text of `token_width` wide token vectors."""
        return self.final_projection_dim or self.inner_width(token_width)


def read_settings(value: Any, token_width: int, where: str) -> Muvera | None:
    """Settings from an option: a map, or true for the defaults; None and false mean none.

    Raises `InvalidInput` for an unknown name, a wrong type or a value out of range.
    """
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected object or bool, got {type(value).__name__}")
    known = {field.name for field in fields(Muvera)}
    for name, given in value.items():
        if name not in known:
            raise InvalidInput(f"{where}: {str(name)[:64]!r} is not one of {', '.join(sorted(known))}")
        _refuse_wrong(name, given, f"{where}.{name}")
    settings = Muvera(**value)
    if settings.inner_width(token_width) > _MOST_VALUES:
        raise InvalidInput(
            f"{where}: {settings.inner_width(token_width)} values per text, the limit is {_MOST_VALUES}"
        )
    return settings


def check_size(settings: Muvera, items: int, token_width: int, max_nbytes: int, where: str) -> None:
    """Raise `InvalidInput` when the vectors of so many items would be too large, or too much work."""
    nbytes = items * settings.width(token_width) * 4
    if nbytes > max_nbytes:
        raise InvalidInput(
            f"{where}: the vectors of {items} items need {nbytes} bytes, the limit is {max_nbytes}"
        )
    work = items * settings.inner_width(token_width)
    if work > _MOST_WORK:
        raise InvalidInput(
            f"{where}: {work} values before the final projection for {items} items, the limit is {_MOST_WORK}"
        )


def _refuse_wrong(name: str, given: Any, where: str) -> None:
    if name == "normalize":
        if not isinstance(given, bool):
            raise InvalidInput(f"{where}: expected bool, got {type(given).__name__}")
        return
    if given is None and name in _OPTIONAL:
        return
    if isinstance(given, bool) or not isinstance(given, int):
        raise InvalidInput(f"{where}: expected int, got {type(given).__name__}")
    low, high = _LIMITS[name]
    if not low <= given <= high:
        raise InvalidInput(f"{where}: {given} is outside {low}..{high}")


def vector_of(tokens: np.ndarray, settings: Muvera, *, is_query: bool) -> np.ndarray:
    """float32 [width] for the token vectors float32 [n, d] of one text."""
    draws = _draws(settings, tokens.shape[1])
    partitions = _partitions(tokens, draws.planes, settings)
    count = 1 << settings.num_simhash_projections
    inner = np.zeros(
        (settings.num_repetitions, count, settings.projection_dim or tokens.shape[1]), np.float32
    )
    for repetition in range(settings.num_repetitions):
        points = tokens if draws.projections is None else tokens @ draws.projections[repetition]
        _gather(inner[repetition], points, partitions[repetition], is_query)
    vector = inner.reshape(-1)
    if draws.buckets is not None and draws.signs is not None:
        folded = np.zeros(settings.final_projection_dim or 0, np.float32)
        np.add.at(folded, draws.buckets, draws.signs * vector)
        vector = folded
    length = np.linalg.norm(vector)
    return vector / length if settings.normalize and length > 0 else vector


def _partitions(tokens: np.ndarray, planes: np.ndarray, settings: Muvera) -> np.ndarray:
    """int64 [repetitions, n]: the partition of each token, the running Gray code of its signs."""
    signs = (tokens @ planes > 0).astype(np.int64)
    signs = signs.reshape(len(tokens), settings.num_repetitions, settings.num_simhash_projections)
    code = np.zeros(signs.shape[:2], np.int64)
    for at in range(settings.num_simhash_projections):
        code = (code << 1) + (signs[:, :, at] ^ (code & 1))
    return code.T


def _gather(inner: np.ndarray, points: np.ndarray, partitions: np.ndarray, is_query: bool) -> None:
    """Sum (queries) or average (documents) the points of each partition into `inner` [partitions, d].

    Points are added one after the other, so that the sums equal the reference's to the bit.
    """
    width = points.shape[1]
    places = partitions[:, None] * width + np.arange(width)
    # PERF: with flat indices `add.at` has a fast path that it lacks for rows.
    np.add.at(inner.reshape(-1), places.reshape(-1), points.reshape(-1))
    if not is_query:
        counts = np.bincount(partitions, minlength=len(inner)).astype(np.float32)
        inner /= np.maximum(counts, 1)[:, None]


@dataclass(frozen=True, slots=True)
class _Draws:
    planes: np.ndarray
    projections: list[np.ndarray] | None
    buckets: np.ndarray | None
    signs: np.ndarray | None


@lru_cache(maxsize=8)
def _draws(settings: Muvera, token_width: int) -> _Draws:
    """The random matrices: planes [d, repetitions * k], projections [d, p] per repetition, the final sketch."""
    repetitions = range(settings.num_repetitions)
    shape = (token_width, settings.num_simhash_projections)
    planes = [
        np.random.default_rng(settings.seed + r).normal(size=shape).astype(np.float32) for r in repetitions
    ]
    projections = None
    if settings.projection_dim is not None:
        projections = [_sketch(token_width, settings.projection_dim, settings.seed + r) for r in repetitions]
    buckets = signs = None
    if settings.final_projection_dim is not None:
        random = np.random.default_rng(settings.seed)
        inner = settings.inner_width(token_width)
        buckets = random.integers(0, settings.final_projection_dim, size=inner)
        signs = random.choice([-1.0, 1.0], size=inner).astype(np.float32)
    return _Draws(np.concatenate(planes, axis=1), projections, buckets, signs)


def _sketch(token_width: int, width: int, seed: int) -> np.ndarray:
    """float32 [token_width, width] with one sign per row."""
    random = np.random.default_rng(seed)
    matrix = np.zeros((token_width, width), np.float32)
    columns = random.integers(0, width, size=token_width)
    matrix[np.arange(token_width), columns] = random.choice([-1.0, 1.0], size=token_width)
    return matrix
