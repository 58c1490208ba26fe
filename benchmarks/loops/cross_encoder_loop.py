"""The direct loop of sentence-transformers' CrossEncoder: `predict` with its defaults over all pairs at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sentence_transformers import CrossEncoder

from benchmarks.loops.child import Vectors, read_questions, serve, setting, take_output


def main() -> None:
    """Load the model and answer commands. See `benchmarks.loops.child`."""
    output = take_output()
    torch.set_num_threads(int(setting("THREADS")))
    questions = read_questions()
    precision = {"dtype": getattr(torch, setting("PRECISION"))}
    model = CrossEncoder(setting("MODEL_DIR"), device=setting("DEVICE"), model_kwargs=precision)

    def predict(chosen: Sequence[tuple[str, list[str]]]) -> Vectors:
        pairs = [(query, document) for query, documents in chosen for document in documents]
        scores: Vectors = model.predict(pairs, show_progress_bar=False)
        return scores

    serve(
        output,
        ["predict"],
        lambda _, count: predict(questions[:count]),
        lambda _, index: predict(questions[index : index + 1]),
    )


if __name__ == "__main__":
    main()
