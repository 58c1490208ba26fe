"""Scores computed without Penstock: sentence-transformers where it reads the model, else the formulas themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch.nn.functional import normalize

from tests.tiny.models import build

Reference = Callable[[str, Sequence[str]], np.ndarray]

QWEN_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def cross_encoder(directory: Path, longest: int = 512, side: str = "right") -> Reference:
    """sentence-transformers' CrossEncoder, one pair at a time, cut on this side."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(directory), device="cpu", max_length=longest)
    model.tokenizer.truncation_side = side

    def scores(query: str, documents: Sequence[str]) -> np.ndarray:
        return np.array([model.predict((query, document)) for document in documents], np.float64)

    return scores


def yes_or_no(directory: Path, longest: int, instruction: str = QWEN_INSTRUCTION) -> Reference:
    """The form of the Qwen3-Reranker model card: softmax over the two answers' logits at the last position."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    answers = [tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")]
    before, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (QWEN_BEFORE, QWEN_AFTER)
    )

    @torch.inference_mode()
    def scores(query: str, documents: Sequence[str]) -> np.ndarray:
        found = []
        for document in documents:
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = [*before, *ids[: longest - len(before) - len(after)], *after]
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            found.append(float(torch.softmax(logits[answers], 0)[0]))
        return np.array(found)

    return scores


def late_interaction(directory: Path) -> Reference:
    """Vectors of sentence-transformers' MultiVectorEncoder, compared pair by pair."""
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(directory), device="cpu")

    def scores(query: str, documents: Sequence[str]) -> np.ndarray:
        asked = torch.as_tensor(model.encode_query([query])[0]).double()
        vectors = [torch.as_tensor(found).double() for found in model.encode_document(list(documents))]
        return np.array([float((asked @ found.T).max(dim=1).values.sum()) for found in vectors])

    return scores


def bge_m3(directory: Path, weights: Sequence[float]) -> Reference:
    """FlagEmbedding's three comparisons, each text alone, in the proportion of `weights` (dense, sparse, colbert)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    sparse, tokens = (
        torch.load(directory / f"{name}_linear.pt", weights_only=True) for name in ("sparse", "colbert")
    )

    @torch.inference_mode()
    def outputs(text: str) -> tuple[Any, dict[int, float], Any]:
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        hidden = model(**encoded).last_hidden_state[0]
        terms: dict[int, float] = {}
        for number, weight in zip(
            encoded["input_ids"][0].tolist(),
            torch.relu(hidden @ sparse["weight"].T + sparse["bias"])[:, 0].tolist(),
            strict=True,
        ):
            if number not in tokenizer.all_special_ids and weight > terms.get(number, 0.0):
                terms[number] = weight
        vectors = normalize(hidden[1:] @ tokens["weight"].T + tokens["bias"], dim=-1)
        return normalize(hidden[0], dim=0), terms, vectors

    def scores(query: str, documents: Sequence[str]) -> np.ndarray:
        asked, found = outputs(query), []
        for document in documents:
            dense, terms, vectors = outputs(document)
            parts = (
                float(asked[0] @ dense),
                sum(weight * terms.get(number, 0.0) for number, weight in asked[1].items()),
                float((asked[2] @ vectors.T).max(dim=1).values.mean()),
            )
            found.append(float(np.dot(parts, weights)) / sum(weights))
        return np.array(found)

    return scores


class Family(NamedTuple):
    """A tiny model, the id and the adapter it is served by, its reference, and the tolerance of its scores."""

    tiny: str
    model: str
    adapter: str
    reference: Callable[[Path], Reference]
    tolerance: float


FAMILIES = (
    Family("rr_bert", "cross-encoder/sigmoid", "cross_encoder", cross_encoder, 1e-5),
    Family("rr_bert_logits", "cross-encoder/logits", "cross_encoder", cross_encoder, 1e-4),
    Family(
        "rr_xlmr",
        "BAAI/bge-reranker-v2-m3",
        "cross_encoder",
        partial(cross_encoder, longest=256),
        1e-5,
    ),
    Family("rr_modernbert", "Alibaba-NLP/modernbert", "cross_encoder", cross_encoder, 1e-5),
    Family("rr_qwen3", "Qwen/Qwen3-Reranker", "qwen3_reranker", lambda at: yes_or_no(at, 512), 1e-5),
    Family("bge_m3", "BAAI/bge-m3-score", "bge_m3", lambda at: bge_m3(at, (1, 0, 0)), 1e-5),
    Family("colbert_pylate", "lightonai/colbert", "colbert", late_interaction, 32e-4),
    Family("colbert_stanford", "colbert-ir/colbertv2.0", "colbert", late_interaction, 32e-4),
)
BY_TINY = {family.tiny: family for family in FAMILIES}
OUTPUTS = {"bge_m3": {"dense": {}, "sparse": {}, "multivector": {}}, "colbert": {"multivector": {}}}


def write_models(place: Path) -> list[str]:
    """Build one tiny model of every score family below `place` and write `place / "catalog"`; returns the ids."""
    catalog = place / "catalog"
    catalog.mkdir(parents=True)
    for family in FAMILIES:
        build(family.tiny, place / family.tiny)
        entry = {
            "id": family.model,
            "source": {"kind": "directory", "path": str(place / family.tiny)},
            "adapter": family.adapter,
            "outputs": {**OUTPUTS.get(family.adapter, {}), "score": {}},
        }
        (catalog / f"{family.tiny}.yaml").write_text(json.dumps(entry))
    return [family.model for family in FAMILIES]
