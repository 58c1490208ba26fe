"""The generators of the benchmarks as Penstock serves them: a directory of weights and a catalog that lists it."""

from __future__ import annotations

import contextlib
import json
import random
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import logging

from benchmarks import llamas

CONTEXT = 16384


@contextlib.contextmanager
def generator(model: str, size: str, adapter: str = "causal") -> Iterator[tuple[Path, Path]]:
    """(weights, catalog) of a Llama of `benchmarks.llamas` that is served as `model`; gone on exit."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        weights, catalog = llamas.save(size, Path(place) / "model"), Path(place) / "catalog"
        config = weights / "config.json"
        # NOTE: positions are rotated, so no weight depends on how many there may be.
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
        catalog.mkdir()
        list_model(catalog, model, weights, adapter, {"chat": {}})
        yield weights, catalog


def list_model(
    catalog: Path, model: str, weights: Path, adapter: str, outputs: dict[str, Any], **more: Any
) -> None:
    """Write the entry of a model with weights of its own; `more` are other fields of the entry."""
    source = {"kind": "directory", "path": str(weights)}
    entry = {"id": model, "source": source, "adapter": adapter, "outputs": outputs, **more}
    (catalog / f"{model.rpartition('/')[2]}.yaml").write_text(json.dumps(entry))


def letters(count: int, seed: int | str) -> str:
    """A text of `count` tokens: capital letters at random."""
    return "".join(random.Random(seed).choices(string.ascii_uppercase, k=count))
