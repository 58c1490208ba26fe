"""Tiny models of the encode families behind one server, and what they must answer, computed apart from the server."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from tests.tiny.models import build
from workers.adapters.shared.building import BUILDING

BGE = "BAAI/bge-m3"
SPLADE, SPLADE_PLAIN, SPLADE_LOOKUP = "tiny/splade", "tiny/splade-plain", "tiny/splade-lookup"
PYLATE, STANFORD = "tiny/colbert-pylate", "tiny/colbert-stanford"
INSTRUCTED, MEAN = "tiny/instructed", "tiny/mean"
LONE = "own/mean"
"""A model that is served by its path."""
WINDOW = 16
"""Tokens of the models that texts are split for: the ids that end in `-short`."""
TEMPLATE = "Instruct: {instruction}\nQuery:{text}"

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    BGE: ("bge_m3", "bge_m3", {}),
    SPLADE: ("splade", "splade", {}),
    SPLADE_PLAIN: ("plain_splade", "splade", {}),
    SPLADE_LOOKUP: ("splade_distilbert", "splade", {"loadtime": {"query_encoding": "idf"}}),
    PYLATE: ("colbert_pylate", "colbert", {}),
    STANFORD: ("colbert_stanford", "colbert", {}),
    INSTRUCTED: ("dense_last", "dense", {"runtime": {"query_template": TEMPLATE}}),
    MEAN: ("dense_mean", "dense", {}),
}
_SHORT = (BGE, SPLADE, PYLATE, MEAN)
_OUTPUTS = {
    "bge_m3": ("dense", "sparse", "multivector"),
    "splade": ("sparse",),
    "colbert": ("multivector",),
    "dense": ("dense",),
}


class Vectors(NamedTuple):
    """What a model gives for one text: dense [d], sparse by term, token vectors [n, d]; None where it has none."""

    dense: np.ndarray | None = None
    sparse: dict[int, float] | None = None
    multivector: np.ndarray | None = None


def write_models(place: Path) -> list[str]:
    """Build the models below `place` and write their catalog into `place / "catalog"`; returns the ids."""
    (place / "catalog").mkdir(parents=True)
    ids = []
    for name, (tiny, adapter, extra) in _MODELS.items():
        directory = build(tiny, place / tiny)
        for short in (False, True) if name in _SHORT else (False,):
            entry = {
                "id": f"{name}-short" if short else name,
                "source": {"kind": "directory", "path": str(directory)},
                "adapter": adapter,
                "outputs": {output: {} for output in _OUTPUTS[adapter]},
                **({"max_sequence_length": WINDOW} if short else {}),
                **extra,
            }
            ids.append(str(entry["id"]))
            (place / "catalog" / f"{len(ids)}.yaml").write_text(json.dumps(entry))
    return ids


def lone_model(place: Path) -> Path:
    """A model that no catalog has, whose files are links as in the cache of the hub."""
    directory = build("dense_mean", place / "blobs")
    below = place / "Mein Modell \u00fc"
    for path in directory.rglob("*.*"):
        link = below / path.relative_to(directory)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return below


@functools.cache
def parts_of(directory: Path, masked_lm: bool = False) -> tuple[Any, Any]:
    """Tokenizer and transformer, opened by transformers alone, which builds one model at a time."""
    factory = AutoModelForMaskedLM if masked_lm else AutoModel
    with BUILDING:
        return AutoTokenizer.from_pretrained(directory), factory.from_pretrained(directory).eval()


@torch.inference_mode()
def bge_m3(directory: Path, ids: Sequence[int]) -> Vectors:
    """All three outputs for one sequence with its special tokens, by the formulas of BGE-M3's authors."""
    tokenizer, model = parts_of(directory)
    sparse = torch.load(directory / "sparse_linear.pt", weights_only=True)
    tokens = torch.load(directory / "colbert_linear.pt", weights_only=True)
    hidden = model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0]
    weights = torch.relu(hidden @ sparse["weight"][0] + sparse["bias"])
    silent = {
        tokenizer.cls_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    terms: dict[int, float] = {}
    for token, weight in zip(ids, weights.tolist(), strict=True):
        if token not in silent and weight > 0:
            terms[token] = max(weight, terms.get(token, 0.0))
    vectors = F.normalize(hidden[1:] @ tokens["weight"].T + tokens["bias"], dim=-1)
    return Vectors(hidden[0].numpy(), terms, vectors.numpy())


@torch.inference_mode()
def splade(directory: Path, ids: Sequence[int]) -> dict[int, float]:
    """Weights by term for one sequence with its special tokens."""
    model = parts_of(directory, masked_lm=True)[1]
    logits = model(input_ids=torch.tensor([list(ids)])).logits[0]
    weights = torch.log1p(torch.relu(logits)).amax(0)
    return {int(term): float(weights[term]) for term in torch.nonzero(weights).flatten()}


def windows(directory: Path, text: str) -> list[list[int]]:
    """A text as sequences of at most `WINDOW` tokens, each between the tokenizer's two special tokens."""
    tokenizer = parts_of(directory)[0]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    first, last = tokenizer.cls_token_id, tokenizer.eos_token_id or tokenizer.sep_token_id
    room = WINDOW - 2
    return [[first, *ids[at : at + room], last] for at in range(0, max(1, len(ids)), room)]


def weighted_mean(rows: Sequence[np.ndarray], parts: Sequence[Sequence[int]]) -> np.ndarray:
    """The mean of one vector per window, weighted by the tokens of the windows, at unit length."""
    mean = np.average(np.stack(rows), axis=0, weights=[len(part) for part in parts])
    return np.asarray(mean / np.linalg.norm(mean))


def strongest(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    """The largest weight of every term over the windows of a text."""
    return {term: max(part.get(term, 0.0) for part in parts) for term in sorted(set().union(*parts))}
