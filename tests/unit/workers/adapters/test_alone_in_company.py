"""Families of vectors, scores and classes: alone equals in company equals the model's own library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.conformance import encoders, towers
from tests.harness.company import Family, Rows, built, compare, every
from workers.adapters.base import SparseRows

QUERY, PREMISE = "where is the <pad> river [PAD]", "This example is {}."
LABELS = ["city", "river </s> [SEP]"]


@functools.cache
def opened(directory: Path, factory: Any = transformers.AutoModel) -> tuple[Any, Any]:
    """Tokenizer and model by transformers alone."""
    if factory is transformers.AutoModel and "t5" in directory.name:
        factory = transformers.AutoModelForTextEncoding
    return transformers.AutoTokenizer.from_pretrained(directory), factory.from_pretrained(directory).eval()


def inputs_of(tokenizer: Any, item: InputItem, *before: str) -> dict[str, torch.Tensor]:
    """Arguments of a model for one item alone."""
    if item.text is None:
        ids = torch.tensor([item.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return dict(tokenizer(*before, item.text, truncation=True, max_length=250, return_tensors="pt"))


def pooled(mode: str) -> Callable[[Path, InputItem], np.ndarray]:
    """The vector of a dense model."""

    @torch.inference_mode()
    def vector(directory: Path, item: InputItem) -> np.ndarray:
        tokenizer, model = opened(directory)
        rows = model(**inputs_of(tokenizer, item)).last_hidden_state[0]
        found = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[mode]
        return F.normalize(found, dim=-1).numpy()

    return vector


def logits(*before: str) -> Callable[[Path, InputItem], np.ndarray]:
    """Logits of a sequence classifier, with a text before the item."""

    @torch.inference_mode()
    def found(directory: Path, item: InputItem) -> np.ndarray:
        tokenizer, model = opened(directory, AutoModelForSequenceClassification)
        return np.asarray(model(**inputs_of(tokenizer, item, *before)).logits[0].numpy())

    return found


@torch.inference_mode()
def hypotheses(directory: Path, item: InputItem) -> np.ndarray:
    """Logits of a text with each label, one after the other, as the zero-shot pipeline of transformers runs them."""
    tokenizer, model = opened(directory, AutoModelForSequenceClassification)
    pairs = [tokenizer(item.text, PREMISE.format(label), return_tensors="pt") for label in LABELS]
    return np.concatenate([model(**pair).logits[0].numpy() for pair in pairs])


@torch.inference_mode()
def tags(directory: Path, item: InputItem) -> np.ndarray:
    """Probabilities of the tags of all tokens."""
    tokenizer, model = opened(directory, AutoModelForTokenClassification)
    return np.asarray(torch.softmax(model(**inputs_of(tokenizer, item)).logits[0], -1).flatten())


def ids_of(directory: Path, item: InputItem) -> list[int]:
    """The ids that a model reads of an item."""
    tokenizer = opened(directory)[0]
    return [int(number) for number in inputs_of(tokenizer, item)["input_ids"][0]]


def spread(terms: dict[int, float]) -> np.ndarray:
    """A sparse vector as a dense one."""
    row = np.zeros(2000)
    row[list(terms)] = list(terms.values())
    return row


def all_of_bge(directory: Path, item: InputItem) -> np.ndarray:
    """Dense, sparse and token vectors by the formulas of BGE-M3's authors."""
    found = encoders.bge_m3(directory, ids_of(directory, item))
    assert found.dense is not None and found.sparse is not None and found.multivector is not None
    dense = found.dense / np.linalg.norm(found.dense)
    return np.concatenate([dense, spread(found.sparse), found.multivector.flatten()])


def said_by_bge(adapter: Any, batch: Any) -> Rows:
    found = adapter.encode(batch, frozenset(("dense", "sparse", "multivector")))
    counts = [sum(map(len, payload.picks)) for payload in batch.payloads]
    tokens = found["multivector"].split(counts)
    sparse = [
        dict(zip(*pair, strict=True))
        for pair in zip(found["sparse"].indices, found["sparse"].values, strict=True)
    ]
    return [
        np.concatenate([dense, spread(terms), rows.flatten()])
        for dense, terms, rows in zip(found["dense"].numpy(), sparse, tokens, strict=True)
    ]


def said_by_dense(adapter: Any, batch: Any) -> Rows:
    return list(adapter.encode(batch, frozenset({"dense"}))["dense"].numpy())


def said_by_splade(adapter: Any, batch: Any) -> Rows:
    found = adapter.encode(batch, frozenset({"sparse"}))["sparse"]
    assert isinstance(found, SparseRows)
    return [spread(dict(zip(*pair, strict=True))) for pair in zip(found.indices, found.values, strict=True)]


def said_by_classifier(adapter: Any, batch: Any) -> Rows:
    rows = iter(adapter._classifier.logits_of_rows(batch.rows).numpy())
    return [np.concatenate([next(rows) for _ in item.sequences]) for item in batch.items]


def said_by_ner(adapter: Any, batch: Any) -> Rows:
    return [scores.flatten() for row in batch.rows for scores in adapter._scores(row)]


def said_by_scorer(adapter: Any, batch: Any) -> Rows:
    return list(adapter.logits(batch).numpy()[:, None])


def dense(items: list[InputItem]) -> Call:
    return EncodeCall(items, ["dense"])


def extract(items: list[InputItem]) -> Call:
    return ExtractCall(items)


FAMILIES = (
    Family("dense", "dense_mean", dense, said_by_dense, pooled("mean"), ids=True),
    Family("dense", "dense_xlmr", dense, said_by_dense, pooled("mean"), ids=True, twin=True),
    Family("dense", "dense_modernbert", dense, said_by_dense, pooled("cls"), ids=True),
    Family("dense", "dense_last", dense, said_by_dense, pooled("last"), ids=True, twin=True),
    Family("dense", "dense_longrope", dense, said_by_dense, pooled("mean"), ids=True),
    Family("dense", "dense_mpnet", dense, said_by_dense, pooled("mean"), ids=True),
    Family("dense", "dense_t5", dense, said_by_dense, pooled("mean"), ids=True),
    Family("bge_m3", "bge_m3", dense, said_by_bge, all_of_bge, ids=True),
    Family(
        "splade",
        "plain_splade",
        lambda items: EncodeCall(items, ["sparse"]),
        said_by_splade,
        lambda directory, item: spread(encoders.splade(directory, ids_of(directory, item))),
        ids=True,
    ),
    Family(
        "cross_encoder",
        "rr_bert",
        lambda items: ScoreCall(items, InputItem(QUERY)),
        said_by_scorer,
        logits(QUERY),
        twin=True,
    ),
    Family(
        "cross_encoder",
        "rr_xlmr",
        lambda items: ScoreCall(items, InputItem(QUERY)),
        said_by_scorer,
        logits(QUERY),
    ),
    Family("ner", "ner_xlmr", extract, said_by_ner, tags),
    Family("text_classification", "classifier_single", extract, said_by_classifier, logits(), ids=True),
    Family("text_classification", "classifier_causal", extract, said_by_classifier, logits(), ids=True),
    Family(
        "nli_zero_shot", "nli_bart", lambda items: ExtractCall(items, LABELS), said_by_classifier, hypotheses
    ),
    Family(
        "clip", "clip", dense, said_by_dense, lambda directory, item: towers.dense(directory, item.text or "")
    ),
    Family(
        "siglip",
        "siglip",
        dense,
        said_by_dense,
        lambda directory, item: towers.dense(directory, item.text or ""),
    ),
)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds each tiny model once."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("alone")
    return functools.partial(built, root)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", every(FAMILIES))
def test_alone_equals_in_company_equals_the_library(
    directory_of: Callable[[str], Path], family: Family
) -> None:
    compare(family, directory_of(family.tiny), seeds=(1,), count=4)


@pytest.mark.long
@pytest.mark.parametrize("family", every(FAMILIES))
def test_many_draws_of_it(directory_of: Callable[[str], Path], family: Family) -> None:
    compare(family, directory_of(family.tiny), seeds=range(2, 20), count=24)
