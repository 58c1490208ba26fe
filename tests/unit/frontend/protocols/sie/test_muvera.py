"""MUVERA against the reference algorithm, written point by point as in the paper's published code."""

from __future__ import annotations

import numpy as np
import pytest

from frontend.protocols.sie.muvera import Muvera, check_size, vector_of
from ipc.errors import InvalidInput

RANDOM = np.random.default_rng(11)


def reference(tokens: np.ndarray, settings: Muvera, *, is_query: bool) -> np.ndarray:
    """The same vector, one token and one partition at a time."""
    width, k = tokens.shape[1], settings.num_simhash_projections
    inner = []
    for repetition in range(settings.num_repetitions):
        seed = settings.seed + repetition
        planes = np.random.default_rng(seed).normal(loc=0.0, scale=1.0, size=(width, k)).astype(np.float32)
        points = tokens
        if settings.projection_dim is not None:
            random = np.random.default_rng(seed)
            matrix = np.zeros((width, settings.projection_dim), np.float32)
            columns = random.integers(0, settings.projection_dim, size=width)
            matrix[np.arange(width), columns] = random.choice([-1.0, 1.0], size=width)
            points = tokens @ matrix
        sums = np.zeros((1 << k, points.shape[1]), np.float32)
        counts = [0] * (1 << k)
        for token, point in zip(tokens @ planes, points, strict=True):
            code = 0
            for value in token:
                code = (code << 1) + (int(value > 0) ^ (code & 1))
            sums[code] += point
            counts[code] += 1
        for code, count in enumerate(counts):
            if count and not is_query:
                sums[code] /= np.float32(count)
        inner.append(sums.reshape(-1))
    vector = np.concatenate(inner)
    if settings.final_projection_dim is not None:
        random = np.random.default_rng(settings.seed)
        buckets = random.integers(0, settings.final_projection_dim, size=vector.size)
        signs = random.choice([-1.0, 1.0], size=vector.size)
        folded = np.zeros(settings.final_projection_dim, np.float32)
        for bucket, sign, value in zip(buckets, signs, vector, strict=True):
            folded[bucket] += np.float32(sign * value)
        vector = folded
    return vector / np.linalg.norm(vector) if settings.normalize else vector


SETTINGS = (
    Muvera(num_repetitions=5, final_projection_dim=257),
    Muvera(num_repetitions=3, final_projection_dim=None, seed=7),
    Muvera(num_repetitions=4, projection_dim=8, final_projection_dim=512),
    Muvera(num_repetitions=2, num_simhash_projections=1, normalize=True),
    Muvera(num_repetitions=2, num_simhash_projections=0, final_projection_dim=64),
)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("is_query", [True, False])
@pytest.mark.parametrize("count", [1, 2, 37, 300])
def test_vectors_equal_the_reference_to_the_bit(settings: Muvera, is_query: bool, count: int) -> None:
    tokens = RANDOM.standard_normal((count, 24)).astype(np.float32)
    got = vector_of(tokens, settings, is_query=is_query)
    assert got.dtype == np.float32 and got.shape == (settings.width(24),)
    assert np.array_equal(got, reference(tokens, settings, is_query=is_query))


def test_a_text_without_tokens_gives_zeros_and_the_default_width() -> None:
    got = vector_of(np.zeros((0, 24), np.float32), Muvera(), is_query=True)
    assert got.shape == (10240,) and not got.any()


def test_products_of_vectors_follow_the_late_interaction_scores() -> None:
    """What the method is for: the document with the largest sum of maxima also has the largest product."""
    query = RANDOM.standard_normal((8, 24)).astype(np.float32)
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    documents = [RANDOM.standard_normal((30, 24)).astype(np.float32) for _ in range(5)]
    documents[3][:8] = query * 5
    documents = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in documents]
    exact = [float((query @ rows.T).max(axis=1).sum()) for rows in documents]
    left = vector_of(query, Muvera(), is_query=True)
    found = [float(left @ vector_of(rows, Muvera(), is_query=False)) for rows in documents]
    assert int(np.argmax(exact)) == int(np.argmax(found)) == 3


def test_vectors_that_would_be_too_large_or_too_much_work_are_refused_with_the_limit() -> None:
    wide = Muvera(128, 12, 32, None)
    with pytest.raises(
        InvalidInput, match=r"where: the vectors of 50 items need .* bytes, the limit is 1000"
    ):
        check_size(wide, 50, 32, 1000, "where")
    folded = Muvera(128, 12, 32, 16)
    check_size(folded, 1, 32, 1 << 20, "where")
    with pytest.raises(InvalidInput, match="before the final projection for 3000 items"):
        check_size(folded, 3000, 32, 1 << 20, "where")
