"""The direct loop of sentence-transformers: `encode` with its defaults over all texts at once (tokenising included)."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from benchmarks.loops.child import Vectors, read_texts, serve, setting, take_output


def main() -> None:
    """Load the model and answer commands. See `benchmarks.loops.child`."""
    output = take_output()
    torch.set_num_threads(int(setting("THREADS")))
    texts = read_texts()
    precision = {"dtype": getattr(torch, setting("PRECISION"))}
    model = SentenceTransformer(setting("MODEL_DIR"), device=setting("DEVICE"), model_kwargs=precision)
    options: dict[str, Any] = {
        "convert_to_numpy": True,
        "normalize_embeddings": True,
        "show_progress_bar": False,
    }

    def encode(chosen: list[str]) -> Vectors:
        vectors: Vectors = model.encode(chosen, **options)
        return vectors

    serve(output, ["encode"], lambda _, count: encode(texts[:count]), lambda _, index: encode([texts[index]]))


if __name__ == "__main__":
    main()
