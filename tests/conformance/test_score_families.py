"""Every score family over HTTP against an independent computation: alone, in mixed batches, cut to length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.conformance import score_references as references
from tests.conformance.conftest import Families
from tests.conformance.score_references import BY_TINY, FAMILIES, OUTPUTS, Family
from tests.conformance.wire import JSON, MSGPACK, assert_refused
from tests.harness.server import Server
from tests.tiny.texts import mixed_lengths, sentences

SENTENCES = sentences()
LONG = " ".join(SENTENCES[:80])
LONG_QUERY = " ".join(SENTENCES[100:160])
HUGE = " ".join(SENTENCES) * 3


class Served(NamedTuple):
    """The server and where the models lie."""

    server: Server
    place: Path

    def reference(self, tiny: str) -> references.Reference:
        """The independent computation for a model."""
        return BY_TINY[tiny].reference(self.place / tiny)


@pytest.fixture
def served(either_families: Families) -> Served:
    """The rerankers behind the server of all families."""
    return Served(either_families.server, either_families.place / "rerankers")


def score(server: Server, model: str, query: str, documents: Sequence[str], **fields: Any) -> np.ndarray:
    """Scores in the order of the documents."""
    body = {"query": {"text": query}, "items": [{"text": document} for document in documents], **fields}
    answer = MSGPACK.post(server, f"/v1/score/{model}", body)
    assert answer.status == 200, answer.body
    found = {entry["item_id"]: entry["score"] for entry in MSGPACK.load(answer.body)["scores"]}
    return np.array([found[f"item-{index}"] for index in range(len(documents))])


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_scores_are_those_of_the_reference(served: Served, family: Family) -> None:
    documents = [*mixed_lengths(), *SENTENCES[40:50]]
    expected = served.reference(family.tiny)(SENTENCES[17], documents)
    together = score(served.server, family.model, SENTENCES[17], documents)
    alone = np.concatenate(
        [score(served.server, family.model, SENTENCES[17], [one]) for one in documents[:6]]
    )
    assert np.abs(together - expected).max() <= family.tolerance
    assert np.abs(alone - expected[:6]).max() <= family.tolerance
    assert np.ptp(expected) > 100 * family.tolerance, "the texts must be told apart for this to mean anything"


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_many_queries_at_once_get_their_own_scores(served: Served, family: Family) -> None:
    requests = [(SENTENCES[3 * n], SENTENCES[5 * n : 5 * n + 1 + n % 7]) for n in range(24)]
    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(score, served.server, family.model, *request) for request in requests]
    reference = served.reference(family.tiny)
    for (query, documents), job in list(zip(requests, jobs, strict=True))[::3]:
        assert np.abs(job.result() - reference(query, documents)).max() <= family.tolerance


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_long_documents_are_cut_as_the_reference_cuts_them(served: Served, family: Family) -> None:
    documents = [LONG, "river", LONG_QUERY]
    expected = served.reference(family.tiny)(SENTENCES[17], documents)
    assert (
        np.abs(score(served.server, family.model, SENTENCES[17], documents) - expected).max()
        <= family.tolerance
    )
    body = {"query": {"text": SENTENCES[17]}, "items": [{"text": text} for text in documents]}
    path = f"/v1/score/{family.model}"
    assert JSON.load(JSON.post(served.server, path, body).body)["usage"]["truncated"] == [0, 2]
    answer = JSON.post(served.server, path, {**body, "options": {"overflow_policy": "error"}})
    assert_refused(answer, 400, "INPUT_TOO_LONG", "items[0]")


@pytest.mark.parametrize("tiny", ["rr_bert", "rr_xlmr", "rr_modernbert"])
def test_a_query_too_long_for_its_pair_shares_the_room_with_the_document(served: Served, tiny: str) -> None:
    documents = [LONG, "river"]
    expected = served.reference(tiny)(LONG_QUERY, documents)
    found = score(served.server, BY_TINY[tiny].model, LONG_QUERY, documents)
    assert np.abs(found - expected).max() <= BY_TINY[tiny].tolerance


def test_a_long_query_leaves_half_of_the_room_to_the_document(served: Served) -> None:
    model = BY_TINY["rr_qwen3"].model
    first, second = score(served.server, model, LONG_QUERY, [SENTENCES[1], SENTENCES[2]])
    assert abs(first - second) > 1e-4, "the documents are still read"


def test_token_counts_are_those_of_the_whole_pair(served: Served) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.place / "rr_bert")
    body = {"query": {"text": SENTENCES[0]}, "items": [{"text": SENTENCES[1]}, {"text": LONG}]}
    answer = JSON.post(served.server, "/v1/score/cross-encoder/sigmoid", body)
    whole = len(tokenizer(SENTENCES[0], SENTENCES[1])["input_ids"])
    assert answer.json()["usage"] == {"tokens": [whole, 512], "truncated": [1]}


def test_the_seeds_example_runs_as_written(served: Served) -> None:
    body = """{
    "query": {"text": "What is machine learning?"},
    "items": [
    {"id": "doc-1", "text": "ML uses algorithms to learn from data."},
    {"id": "doc-2", "text": "The weather is sunny today."}
    ]
    }"""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    answer = served.server.request("POST", "/v1/score/BAAI/bge-reranker-v2-m3", body.encode(), headers)
    found = answer.json()
    assert answer.status == 200 and found["model"] == "BAAI/bge-reranker-v2-m3"
    assert {entry["item_id"] for entry in found["scores"]} == {"doc-1", "doc-2"}
    assert [entry["rank"] for entry in found["scores"]] == [0, 1]
    assert all(0 < entry["score"] < 1 for entry in found["scores"])


MODES: dict[str, tuple[dict[str, Any], tuple[float, float, float]]] = {
    "dense": ({"score_mode": "dense"}, (1, 0, 0)),
    "sparse": ({"score_mode": "sparse"}, (0, 1, 0)),
    "colbert": ({"score_mode": "colbert"}, (0, 0, 1)),
    "hybrid": ({"score_mode": "hybrid"}, (1, 1, 1)),
    "weighted": (
        {"score_mode": "hybrid", "score_weights": {"dense": 0.4, "sparse": 0.2, "colbert": 0.4}},
        (0.4, 0.2, 0.4),
    ),
    "two of them": ({"score_mode": "hybrid", "score_weights": {"sparse": 1, "colbert": 3}}, (0, 1, 3)),
    "weights without hybrid": ({"score_weights": {"sparse": 1}}, (1, 0, 0)),
}


def test_bge_m3_scores_in_every_mode_also_in_mixed_batches(served: Served) -> None:
    documents = [*mixed_lengths(), LONG, *SENTENCES[:9]]
    with ThreadPoolExecutor(len(MODES)) as pool:
        jobs = {
            name: pool.submit(
                score, served.server, BY_TINY["bge_m3"].model, SENTENCES[17], documents, options=options
            )
            for name, (options, _) in MODES.items()
        }
    for name, (_, weights) in MODES.items():
        expected = references.bge_m3(served.place / "bge_m3", weights)(SENTENCES[17], documents)
        assert np.abs(jobs[name].result() - expected).max() <= 1e-4, name


WRONG_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("score_mode", {"score_mode": "best"}),
    ("score_mode", {"score_mode": 5}),
    ("score_weights", {"score_weights": [1, 2, 3]}),
    ("score_weights", {"score_weights": {"lexical": 1}}),
    ("score_weights.dense", {"score_weights": {"dense": -0.1}}),
    ("score_weights.dense", {"score_weights": {"dense": "1"}}),
    ("score_weights.dense", {"score_weights": {"dense": True}}),
    ("score_weights.dense", {"score_weights": {"dense": 1e300}}),
    ("score_weights", {"score_weights": {}}),
    ("score_weights", {"score_weights": {"dense": 0, "sparse": 0}}),
)


@pytest.mark.parametrize(("field", "options"), WRONG_OPTIONS)
def test_wrong_score_options_are_refused_by_name(served: Served, field: str, options: dict[str, Any]) -> None:
    body = {"query": {"text": "a"}, "items": [{"text": "b"}], "options": options}
    assert_refused(
        served.server.post("/v1/score/BAAI/bge-m3-score", body), 400, "INVALID_INPUT", f"options.{field}"
    )


@pytest.mark.parametrize("tiny", ["rr_bert", "rr_qwen3", "colbert_stanford"])
def test_an_option_of_another_family_changes_nothing_and_lora_is_refused_by_name(
    served: Served, tiny: str
) -> None:
    path = f"/v1/score/{BY_TINY[tiny].model}"
    body: dict[str, Any] = {"query": {"text": "a"}, "items": [{"text": "b"}, {"text": "a"}]}
    plain = served.server.post(path, body).json()["scores"]
    assert served.server.post(path, body | {"options": {"score_mode": "dense"}}).json()["scores"] == plain
    refused = served.server.post(path, body | {"options": {"lora": "some"}})
    assert_refused(refused, 400, "INVALID_INPUT", "options.lora")


REFUSAL = re.compile(r"(\S+): (\d+) tokens( with the query)?, the limit of (\S+) is (\d+)")


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_a_refusal_names_the_side_that_is_too_long_its_tokens_and_its_limit(
    served: Served, family: Family
) -> None:
    apart = family.adapter in OUTPUTS
    tokenizer = AutoTokenizer.from_pretrained(served.place / family.tiny)

    def refusal(path: str, body: dict[str, Any]) -> tuple[str, int, bool, int]:
        answer = served.server.post(path, body)
        found = REFUSAL.fullmatch(answer.json()["detail"]["message"])
        assert answer.status == 400 and found is not None, answer.body
        assert found[4] == family.model
        return found[1], int(found[2]), bool(found[3]), int(found[5])

    for query, document in ((HUGE, "river"), ("river", HUGE)):
        items, too_long = [{"text": "a"}, {"text": document}], query == HUGE
        body = {"query": {"text": query}, "items": items, "options": {"overflow_policy": "error"}}
        field, tokens, beside, limit = refusal(f"/v1/score/{family.model}", body)
        assert field == ("query.text" if too_long else "items[1].text")
        assert beside == (not apart and not too_long) and tokens > limit
        if family.adapter == "cross_encoder":
            around = tokenizer.num_special_tokens_to_add(pair=True)
            halves = tokenizer([query] if too_long else [query, document], add_special_tokens=False)
            assert tokens == sum(map(len, halves["input_ids"])) + around
        elif apart:
            assert tokens == len(tokenizer(HUGE)["input_ids"]) + (family.adapter == "colbert")
        body = {"model": family.model, "query": query, "documents": ["a", document]}
        found = refusal("/v1/rerank", {**body, "overflow_policy": "error"})
        assert found == ("query" if too_long else "documents[1]", tokens, beside, limit)


@pytest.mark.parametrize("tiny", ["rr_bert", "rr_xlmr", "rr_modernbert"])
def test_pairs_lose_their_beginnings_on_demand(served: Served, tiny: str) -> None:
    model, longest = BY_TINY[tiny].model, 256 if tiny == "rr_xlmr" else 512
    documents, options = [LONG, "river"], {"overflow_policy": "truncate_left"}
    found = score(served.server, model, SENTENCES[17], documents, options=options)
    expected = references.cross_encoder(served.place / tiny, longest, "left")(SENTENCES[17], documents)
    assert np.abs(found - expected).max() <= BY_TINY[tiny].tolerance
    assert abs(found[0] - score(served.server, model, SENTENCES[17], documents)[0]) > 1e-4


@pytest.mark.parametrize(
    ("tiny", "policy", "offered"),
    [
        ("rr_bert", "chunk", "only default, truncate_text, truncate_left, error"),
        ("rr_qwen3", "chunk", "only default, truncate_text, error"),
        ("rr_qwen3", "truncate_left", "only default, truncate_text, error"),
    ],
)
def test_what_cannot_be_done_with_pairs_is_refused_by_the_name_of_the_option(
    served: Served, tiny: str, policy: str, offered: str
) -> None:
    body = {"query": {"text": "a"}, "items": [{"text": "b"}], "options": {"overflow_policy": policy}}
    answer = served.server.post(f"/v1/score/{BY_TINY[tiny].model}", body)
    assert_refused(answer, 400, "INVALID_INPUT", f"options.overflow_policy: {policy!r}", offered)
    asked = {"model": BY_TINY[tiny].model, "query": "a", "documents": ["b"], "overflow_policy": policy}
    answer = served.server.post("/v1/rerank", asked)
    assert answer.status == 400 and answer.json()["message"].startswith(f"overflow_policy: {policy!r}")


def test_a_chunked_document_is_matched_as_a_whole(served: Served) -> None:
    options = {"overflow_policy": "chunk"}
    model = BY_TINY["colbert_stanford"].model
    [cut] = score(served.server, model, SENTENCES[17], [LONG])
    [whole] = score(served.server, model, SENTENCES[17], [LONG], options=options)
    assert whole > cut, "more tokens can only match better"


def test_the_instruction_reaches_the_query(served: Served) -> None:
    model, documents = BY_TINY["rr_qwen3"].model, SENTENCES[:5]
    found = score(served.server, model, SENTENCES[17], documents, instruction="find rivers")
    reference = references.yes_or_no(served.place / "rr_qwen3", 512, "find rivers")
    assert np.abs(found - reference(SENTENCES[17], documents)).max() <= 1e-5
    found = score(served.server, "cross-encoder/sigmoid", "query", documents, instruction="find rivers")
    expected = served.reference("rr_bert")("find rivers query", documents)
    assert np.abs(found - expected).max() <= 1e-5


def test_a_model_that_encodes_and_scores_does_both_at_once(served: Served) -> None:
    def encode() -> int:
        items = [{"text": text} for text in SENTENCES[:20]]
        body = {"items": items, "params": {"output_types": ["dense", "multivector"]}}
        return MSGPACK.post(served.server, "/v1/encode/BAAI/bge-m3-score", body).status

    with ThreadPoolExecutor(8) as pool:
        encoded = [pool.submit(encode) for _ in range(6)]
        jobs = [
            pool.submit(score, served.server, "BAAI/bge-m3-score", SENTENCES[17], SENTENCES[:9])
            for _ in range(6)
        ]
    assert [job.result() for job in encoded] == [200] * 6
    expected = served.reference("bge_m3")(SENTENCES[17], SENTENCES[:9])
    assert all(np.abs(job.result() - expected).max() <= 1e-5 for job in jobs)


def test_rerank_orders_documents_by_the_same_scores(served: Served) -> None:
    documents = SENTENCES[:8]
    expected = score(served.server, "BAAI/bge-reranker-v2-m3", SENTENCES[17], documents)
    body = {"model": "BAAI/bge-reranker-v2-m3", "query": SENTENCES[17], "documents": documents, "top_n": 5}
    found = served.server.post("/v1/rerank", body).json()["results"]
    assert [entry["index"] for entry in found] == np.argsort(-expected, kind="stable")[:5].tolist()
    assert np.allclose([entry["relevance_score"] for entry in found], np.sort(expected)[::-1][:5], atol=1e-6)
