"""Scores computed without Penstock: sentence-transformers where it reads the model, else the formulas themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import normalize

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
