"""The routes of other servers over real small models: the numbers are those of the SIE routes, of the same requests."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import AutoTokenizer

from tests.conformance.conftest import Families
from tests.conformance.encoders import MEAN, PYLATE, SPLADE
from tests.conformance.towers import CLIP
from tests.harness.server import Server
from tests.tiny.pictures import encoded as encoded_picture
from tests.tiny.pictures import picture
from tests.tiny.texts import sentences

SCORER, CLASSIFIER = "cross-encoder/logits", "tiny/moods"
TEXTS = [*sentences()[:3], "", "Grüße 👋"]


@pytest.fixture
def server(either_families: Families) -> Server:
    """The server of all families, whose settings name the models of requests without a model."""
    return either_families.server


def asked(server: Server, path: str, body: dict[str, Any], status: int = 200) -> Any:
    """The JSON of an answer."""
    answer = server.post(path, body)
    assert answer.status == status, answer.body
    return answer.json()


def encoded(server: Server, model: str, output: str, **params: Any) -> list[dict[str, Any]]:
    """The SIE route's output of each text."""
    items = [{"text": text} for text in TEXTS]
    found = asked(
        server, f"/v1/encode/{model}", {"items": items, "params": {"output_types": [output], **params}}
    )
    return [item[output] for item in found["items"]]


def scored(server: Server, query: str) -> np.ndarray:
    """The SIE route's scores in the order of the texts."""
    body = {
        "query": {"text": query},
        "items": [{"id": str(at), "text": text} for at, text in enumerate(TEXTS)],
    }
    found = asked(server, f"/v1/score/{SCORER}", body)["scores"]
    return np.array([one["score"] for one in sorted(found, key=lambda one: int(one["item_id"]))])


def test_embed(server: Server) -> None:
    wanted = np.array([entry["values"] for entry in encoded(server, MEAN, "dense")])
    plain = asked(server, "/embed", {"inputs": TEXTS, "normalize": False})
    assert np.array_equal(plain, wanted)
    units = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    assert np.allclose(asked(server, "/embed", {"inputs": TEXTS}), units, atol=1e-6)
    assert asked(server, "/", {"inputs": TEXTS}) == asked(server, "/embed", {"inputs": TEXTS})
    assert asked(server, "/", {"inputs": []}, 422)["error_type"] == "Validation"
    cosines = asked(server, "/similarity", {"inputs": {"source_sentence": TEXTS[1], "sentences": TEXTS}})
    assert np.allclose(cosines, units @ units[1], atol=1e-6)


def test_embed_all_and_embed_sparse(server: Server) -> None:
    for wanted, found in zip(
        encoded(server, PYLATE, "multivector"), asked(server, "/embed_all", {"inputs": TEXTS}), strict=True
    ):
        assert np.array_equal(found, wanted["values"])
    for wanted, terms in zip(
        encoded(server, SPLADE, "sparse"), asked(server, "/embed_sparse", {"inputs": TEXTS}), strict=True
    ):
        assert [term["index"] for term in terms] == wanted["indices"]
        assert np.allclose([term["value"] for term in terms], wanted["values"], rtol=1e-6)


def test_rerank_gives_logits_or_their_sigmoid(server: Server) -> None:
    wanted = scored(server, TEXTS[0])
    for raw, expected in ((True, wanted), (False, 1 / (1 + np.exp(-wanted)))):
        found = asked(server, "/rerank", {"query": TEXTS[0], "texts": TEXTS, "raw_scores": raw})
        assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
        assert np.allclose(
            [one["score"] for one in found], expected[[one["index"] for one in found]], atol=1e-5
        )


def test_predict(server: Server) -> None:
    items = [{"text": text} for text in TEXTS]
    for raw, options in ((False, {}), (True, {"function_to_apply": "none"})):
        body = {"items": items, "params": {"options": options}}
        wanted = [
            item["classifications"] for item in asked(server, f"/v1/extract/{CLASSIFIER}", body)["items"]
        ]
        found = asked(server, "/predict", {"inputs": [[text] for text in TEXTS], "raw_scores": raw})
        assert [[{"label": one["label"], "score": one["score"]} for one in item] for item in found] == wanted
    assert asked(server, "/predict", {"inputs": TEXTS[0]}) == asked(
        server, "/predict", {"inputs": [TEXTS[0]]}
    )


def test_predict_reads_pairs_as_transformers_does(server: Server, tiny_extractors: Path) -> None:
    reference = transformers.pipeline(
        "text-classification", model=str(tiny_extractors / "classifier"), device="cpu", top_k=None
    )
    long = " ".join(sentences()[:60])
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[0]), ("", TEXTS[2]), (long, TEXTS[0]), (TEXTS[0], long)]
    wanted = [
        reference({"text": first, "text_pair": second}, truncation="longest_first") for first, second in pairs
    ]
    batch = [[TEXTS[3]], *map(list, pairs)]
    found = asked(server, "/predict", {"inputs": batch})
    alone = [asked(server, "/predict", {"inputs": one}) for one in (TEXTS[3], list(pairs[0]))]
    for classes, expected in zip([*found[1:], *found[:2]], [*wanted, *alone], strict=True):
        assert [one["label"] for one in classes] == [one["label"] for one in expected]
        assert np.allclose([one["score"] for one in classes], [one["score"] for one in expected], atol=1e-5)
    assert found[1] != found[2]
    refused = asked(server, "/predict", {"inputs": batch, "truncate": False}, 422)
    assert refused["error"].startswith("inputs[4]: ") and "in both texts" in refused["error"]


def test_the_routes_of_vllm(server: Server, tiny_extractors: Path) -> None:
    plain = [entry["values"] for entry in encoded(server, MEAN, "dense")]
    pooled = asked(server, "/pooling", {"model": MEAN, "input": TEXTS})["data"]
    assert np.array_equal([one["data"] for one in pooled], plain)
    token_vectors = [entry["values"] for entry in encoded(server, PYLATE, "multivector")]
    pooled = asked(server, "/pooling", {"model": PYLATE, "input": TEXTS})["data"]
    assert all(np.array_equal(one["data"], wanted) for one, wanted in zip(pooled, token_vectors, strict=True))
    body = {"text_1": TEXTS[0], "text_2": TEXTS, "use_activation": False}
    found = [one["score"] for one in asked(server, "/v1/score", body)["data"]]
    assert np.allclose(found, scored(server, TEXTS[0]), atol=1e-5)
    for model in (SCORER, "Qwen/Qwen3-Reranker", "lightonai/colbert"):
        firsts = [TEXTS[0], TEXTS[1], TEXTS[1], "", TEXTS[2]]
        each = [
            asked(server, "/v1/score", {"model": model, "text_1": first, "text_2": second})["data"][0]
            for first, second in zip(firsts, TEXTS, strict=True)
        ]
        body = {"model": model, "text_1": firsts, "text_2": TEXTS}
        found = [one["score"] for one in asked(server, "/v1/score", body)["data"]]
        assert np.allclose(found, [one["score"] for one in each], atol=1e-4)
    body = {"text_1": ["a", "river " * 2000, "b"], "text_2": ["1", "2", "3"]}
    assert asked(server, "/v1/score", body, 400)["error"]["message"].startswith("text_1[1]: ")
    items = {"items": [{"text": text} for text in TEXTS]}
    for one, wanted in zip(
        asked(server, "/classify", {"input": TEXTS})["data"],
        asked(server, f"/v1/extract/{CLASSIFIER}", items)["items"],
        strict=True,
    ):
        scores = sorted((entry["score"] for entry in wanted["classifications"]), reverse=True)
        assert one["label"] == wanted["classifications"][0]["label"] and one["num_classes"] == len(scores)
        assert sorted(one["probs"], reverse=True) == scores
    labels = asked(server, "/classify", {"input": TEXTS[0]})["data"]
    moods = AutoTokenizer.from_pretrained(tiny_extractors / "classifier")
    ids = moods(TEXTS[0])["input_ids"]
    assert asked(server, "/classify", {"input": ids})["data"] == labels
    refused = asked(server, "/classify", {"input": [ids, [10**6]]}, 400)
    assert "input[1]: token id 1000000 is outside" in refused["error"]["message"]


def test_the_embeddings_of_infinity_are_unit_vectors_of_texts_and_images(server: Server) -> None:
    data = encoded_picture(picture(1))
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    body = {"model": CLIP, "input": [uri], "modality": "image"}
    items = [{"images": [{"data": base64.b64encode(data).decode(), "format": "png"}]}]
    [wanted] = asked(server, f"/v1/encode/{CLIP}", {"items": items})["items"]
    [found] = asked(server, "/embeddings", body)["data"]
    assert np.allclose(found["embedding"], wanted["dense"]["values"], atol=1e-6)
    plain = np.array([entry["values"] for entry in encoded(server, MEAN, "dense")])
    texts = asked(server, "/embeddings", {"model": MEAN, "input": TEXTS, "dimensions": 5})["data"]
    units = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.allclose([one["embedding"] for one in texts], units[:, :5], atol=1e-6)
    refused = server.post("/embeddings", {**body, "input": ["https://images.example/a.png"]})
    assert refused.status == 400 and "is not fetched" in refused.json()["error"]["message"]
    broken = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    refused = server.post("/embeddings", {**body, "input": [uri, broken]})
    assert refused.status == 400 and "input[1]" in refused.json()["error"]["message"]


def test_tokenize_and_decode(server: Server, families: Families) -> None:
    tokenizer = AutoTokenizer.from_pretrained(families.place / "encoders" / "dense_mean")
    found = asked(server, "/tokenize", {"inputs": TEXTS})
    for text, entries in zip(TEXTS, found, strict=True):
        assert [one["id"] for one in entries] == tokenizer(text)["input_ids"]
        pieces = [one for one in entries if not one["special"]]
        assert all(one["text"] == text[one["start"] : one["stop"]] for one in pieces)
        ends = [one for one in entries if one["special"]]
        assert [one["text"] for one in ends] == tokenizer.convert_ids_to_tokens([one["id"] for one in ends])
        assert all(one["start"] is None and one["stop"] is None for one in ends)
    bare = asked(server, "/tokenize", {"inputs": TEXTS[0], "add_special_tokens": False})
    assert [one["id"] for one in bare[0]] == tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    for skips in (True, False):
        texts = asked(server, "/decode", {"ids": ids, "skip_special_tokens": skips})
        assert texts == [tokenizer.decode(each, skip_special_tokens=skips) for each in ids]
    refused = asked(server, "/decode", {"ids": [ids[0], [10**6]]}, 422)
    assert "ids[1]: token id 1000000 is outside" in refused["error"]
    long = asked(server, "/tokenize", {"inputs": ["river " * 100_000, "x" * 500_000]}, 422)
    assert "inputs: 1100000 bytes in all, the limit is 1048576 (limits.max_text_bytes)" in long["error"]
    many = asked(server, "/tokenize", {"inputs": "river " * 20_000})
    assert len(many[0]) == len(tokenizer("river " * 20_000)["input_ids"])
