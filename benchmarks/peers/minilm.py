"""The model step that every peer server runs: sentence-transformers `encode` on CPU, float32, normalised.

Runs in a peer's own environment; the model directory and the thread count come from `BENCHMARK_MODEL_DIR` and
`BENCHMARK_THREADS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

BATCH_SIZE = 32
BATCH_WAIT_MS = 10


def load_encoder() -> Callable[[Sequence[str]], Any]:
    """A function from texts to a float32 array [texts, 384]."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(int(os.environ["BENCHMARK_THREADS"]))
    model = SentenceTransformer(os.environ["BENCHMARK_MODEL_DIR"], device="cpu")

    options: dict[str, Any] = {
        "convert_to_numpy": True,
        "normalize_embeddings": True,
        "show_progress_bar": False,
    }
    return lambda texts: model.encode(list(texts), batch_size=BATCH_SIZE, **options)


def texts_of(request: dict[str, Any]) -> list[str]:
    """The texts of an OpenAI-style embeddings request."""
    value = request["input"]
    return [value] if isinstance(value, str) else list(value)


def encode_together(encode: Callable[[Sequence[str]], Any], requests: Sequence[Sequence[str]]) -> list[Any]:
    """Encode the texts of several requests in one call; one array per request."""
    vectors = encode([text for request in requests for text in request])
    results, start = [], 0
    for request in requests:
        results.append(vectors[start : start + len(request)])
        start += len(request)
    return results


def answer(vectors: Any) -> dict[str, Any]:
    """The data part of an OpenAI-style embeddings answer."""
    return {"data": [{"embedding": vector.tolist(), "index": index} for index, vector in enumerate(vectors)]}
