"""Every family that reads texts: alone equals in company equals the model's own library.

Texts are drawn from words, long words, and the tokens that a model may treat apart: padding, ends, unknown and added
ones. Ids are drawn from the whole table of embeddings.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.conformance import encoders, towers
from tests.tiny.models import build
from tests.tiny.texts import sentences
from workers.adapters.base import Adapter, LoadContext, Prepared, SparseRows
from workers.adapters.registry import resolve

QUERY, PREMISE = "where is the <pad> river [PAD]", "This example is {}."
LABELS = ["city", "river </s> [SEP]"]
Rows = list[np.ndarray]


class Family(NamedTuple):
    """A family over a tiny model: a call, what the adapter says of a batch, and what a library says of an item.

    `ids` tells whether items may be token ids.
    """

    name: str
    tiny: str
    call: Callable[[list[InputItem]], Call]
    said: Callable[[Any, Any], Rows]
    library: Callable[[Path, InputItem], np.ndarray]
    ids: bool = False


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
    Family("dense", "dense_xlmr", dense, said_by_dense, pooled("mean"), ids=True),
    Family("dense", "dense_modernbert", dense, said_by_dense, pooled("cls"), ids=True),
    Family("dense", "dense_last", dense, said_by_dense, pooled("last"), ids=True),
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
    return lambda name: root / name if (root / name).is_dir() else build(name, root / name)


def load(family: str, directory: Path) -> Adapter:
    """The adapter of a directory on CPU."""
    return resolve(family).load(
        LoadContext(directory, directory.name, torch.device("cpu"), torch.float32, 250, {}, lambda *_: None)
    )


def drawn_texts(draw: random.Random, tokenizer: Any, count: int) -> list[InputItem]:
    """Texts of uneven lengths with special tokens among their words."""
    apart = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), "\u2603\u2603", "zzqqj"]
    words = " ".join(sentences()[:40]).split()
    texts = []
    for _ in range(count):
        length = draw.choice((1, 3, 6, 7, 20, 24))
        texts.append(" ".join(draw.choice(apart if draw.random() < 0.3 else words) for _ in range(length)))
    return [InputItem(text) for text in texts]


def drawn_ids(draw: random.Random, tokenizer: Any, rows: int, count: int) -> list[InputItem]:
    """Ids of uneven lengths, some of them special."""
    apart = [*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()]
    return [
        InputItem(
            ids=[
                draw.choice(apart) if draw.random() < 0.3 else draw.randrange(rows)
                for _ in range(draw.choice((1, 4, 40, 62, 68, 120)))
            ]
        )
        for _ in range(count)
    ]


@torch.inference_mode()
def said(family: Family, adapter: Adapter, items: Sequence[InputItem]) -> Rows:
    """What the adapter says of items in one batch."""
    prepared = adapter.prepare(items, family.call(list(items)))
    assert all(isinstance(one, Prepared) for one in prepared)
    return family.said(adapter, adapter.collate(prepared))  # type: ignore[arg-type]


def compare(family: Family, directory: Path, seeds: Sequence[int], count: int) -> None:
    """Draw batches, and compare each item alone, in its batch, and by the library."""
    adapter = load(family.name, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = len(tokenizer)
    for seed in seeds:
        draw = random.Random(seed)
        items = drawn_texts(draw, tokenizer, count)
        if family.ids:
            items += drawn_ids(draw, tokenizer, rows, count)
        for item, found in zip(items, said(family, adapter, items), strict=True):
            [alone] = said(family, adapter, [item])
            np.testing.assert_allclose(found, alone, rtol=0, atol=2e-5, err_msg=f"company: {item}")
            wanted = family.library(directory, item)
            np.testing.assert_allclose(alone, wanted, rtol=0, atol=5e-5, err_msg=f"library: {item}")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_alone_equals_in_company_equals_the_library(
    directory_of: Callable[[str], Path], family: Family
) -> None:
    compare(family, directory_of(family.tiny), seeds=(1,), count=6)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_many_draws_of_it(directory_of: Callable[[str], Path], family: Family) -> None:
    compare(family, directory_of(family.tiny), seeds=range(2, 20), count=24)
