"""Texts of which a tokenizer makes nothing, in every family that reads texts: an answer, or a refusal that names the
text, and the same values for the items beside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.errors import InvalidInput
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.conformance.extractors import required_library
from tests.harness.company import Family, built, load, said
from tests.tiny.pictures import encoded, picture
from tests.unit.workers.adapters.test_alone_in_company import FAMILIES as VECTORS
from tests.unit.workers.adapters.test_finders_in_company import FAMILIES as FINDERS
from tests.unit.workers.adapters.test_finders_in_company import LIBRARIES
from workers import operations
from workers.adapters.base import Adapter, ItemRefused, Prepared
from workers.inputs import NOTHING

BLANK = ("", "\n\t", "\x00")
WHOLE = "the river in Paris"
KEPT = ("siglip", "nli_bart")
"""Models that need the special tokens of their tokenizers: a SentencePiece file, and an end that the model needs."""
READERS = [one for one in (*VECTORS, *FINDERS) if one.item is InputItem and not one.twin]


def bare(directory: Path) -> Path:
    """Take the special tokens that a tokenizer puts around texts away, so that an empty text has no token."""
    for path in directory.rglob("tokenizer.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    for path in directory.rglob("tokenizer_config.json"):
        facts = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        path.write_text(json.dumps(facts))
    return directory


@pytest.fixture(scope="module")
def bare_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Adapter]:
    """The adapter of a family over a tiny model without special tokens around texts."""
    torch.set_num_threads(1)
    root, known = tmp_path_factory.mktemp("bare"), dict[str, Path]()

    def adapter(family: str, tiny: str) -> Adapter:
        if family in LIBRARIES:
            required_library(family)
        if tiny not in known:
            known[tiny] = built(root, tiny) if tiny in KEPT else bare(built(root, tiny))
        return load(family, known[tiny], 250)

    return adapter


@torch.inference_mode()
def answer(adapter: Adapter, call: Call) -> list[bool]:
    """Whether each value of a call is finite, as the worker runs calls. Raises what refuses the call."""
    operations.check(adapter, call)
    operation = operations.operation_of(call)
    prepared = operation.prepare(adapter, call, 0, len(call.items), NOTHING)
    kept = [one for one in prepared if isinstance(one, Prepared)]
    assert {one.code for one in prepared if not isinstance(one, Prepared)} <= {"INVALID_INPUT"}
    results = operation.run(adapter, adapter.collate(kept), call)
    assert {one.code for one in results.failures.values()} <= {"INVALID_INPUT"}
    return list(results.finite([one.rows for one in kept]))


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "family", [pytest.param(one, id=f"{one.tiny}-{at}") for at, one in enumerate(READERS)]
)
def test_a_text_without_tokens_is_answered_and_changes_no_neighbour(
    bare_of: Callable[[str, str], Adapter], family: Family
) -> None:
    adapter = bare_of(family.name, family.tiny)
    [first], [last] = (said(family, adapter, [InputItem(text)]) for text in (WHOLE, "Paris"))
    for blank in BLANK:
        found = said(family, adapter, [InputItem(text) for text in (WHOLE, blank, "Paris")])
        np.testing.assert_allclose(found[0], first, rtol=0, atol=2e-5)
        np.testing.assert_allclose(found[-1], last, rtol=0, atol=2e-5)
        assert all(np.isfinite(row).all() for row in found)
        assert all(answer(adapter, family.call([InputItem(WHOLE), InputItem(blank)])))


def queries(blank: str) -> Iterator[tuple[str, str, Call]]:
    """Calls with a blank text in another place than an item, each for one model of a family."""
    items = [InputItem(WHOLE), InputItem(blank)]
    pairs = [InputItem(blank, first=blank), InputItem("a", first=blank), InputItem(blank, first="a")]
    for family, tiny in (
        ("cross_encoder", "rr_bert"),
        ("qwen3_reranker", "rr_qwen3"),
        ("colbert", "colbert_pylate"),
    ):
        yield family, tiny, ScoreCall(items, InputItem(blank))
    yield "cross_encoder", "rr_bert", ScoreCall(pairs, InputItem("q"))
    yield "text_classification", "classifier_single", ExtractCall(pairs)
    yield "dense", "dense_mean", EncodeCall(items, ["dense"], instruction=blank)
    yield "dense", "dense_mean", EncodeCall(items, ["dense"], overflow="chunk")
    for family, tiny in (("gliner", "gliner"), ("gliner2", "gliner2"), ("gliclass", "gliclass")):
        yield family, tiny, ExtractCall(items, ["city", blank or " "])
    yield "owlv2", "owlv2", ExtractCall([InputItem(images=[encoded(picture(1))])], ["cat", blank or " "])


@pytest.mark.parametrize("blank", BLANK, ids=[f"U+{ord(each[0]):04X}" if each else "empty" for each in BLANK])
def test_queries_pairs_and_labels_without_tokens_are_answered(
    bare_of: Callable[[str, str], Adapter], blank: str
) -> None:
    for family, tiny, call in queries(blank):
        assert all(answer(bare_of(family, tiny), call)), (family, call)


def asked_about(question: str, word: str) -> Call:
    page = {"words": [word, word], "boxes": [[0, 0, 32, 32], [32, 0, 32, 32]]}
    picture_of_page = encoded(picture(1))
    return ExtractCall([InputItem(images=[picture_of_page], metadata=page)], instruction=question)


@pytest.mark.parametrize(
    ("family", "tiny", "call", "words"),
    [
        (
            "gliner",
            "gliner_bi",
            ExtractCall([InputItem(WHOLE)], ["city", "\x00"]),
            r"labels\[1\]: '\\x00' has no token",
        ),
        (
            "grounding_dino",
            "grounding_dino",
            ExtractCall([InputItem(images=[encoded(picture(1))])], ["cat", " "]),
            r"labels\[1\]: ' ' has no token",
        ),
        ("document_qa", "layoutlm", asked_about("\x00", "\x00"), "the question has no token"),
        ("document_qa", "layoutlm", asked_about("", "river"), "needs a question"),
        (
            "dense",
            "dense_mean",
            EncodeCall([InputItem(WHOLE), InputItem(ids=[])], ["dense"]),
            "at least one token id",
        ),
        (
            "text_classification",
            "classifier_single",
            ExtractCall([InputItem(ids=[])]),
            "at least one token id",
        ),
    ],
    ids=["bi-encoder", "grounding", "question", "blank", "ids", "classified"],
)
def test_what_no_model_can_read_is_refused_by_name(
    bare_of: Callable[[str, str], Adapter], family: str, tiny: str, call: Any, words: str
) -> None:
    with pytest.raises((InvalidInput, ItemRefused), match=words):
        answer(bare_of(family, tiny), call)


def test_words_without_tokens_are_no_answer(bare_of: Callable[[str, str], Adapter]) -> None:
    assert answer(bare_of("document_qa", "layoutlm"), asked_about("Where?", "\x00"))
