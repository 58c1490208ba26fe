"""The routes of vLLM: which model answers, the forms of answers and errors, what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes.vector_server import CLASSIFIER, DENSE, LABELS, SCORE, VectorServer

USAGE = {"completion_tokens": 0, "prompt_tokens_details": None}


@pytest.fixture
def server(tmp_path: Path) -> VectorServer:
    """All routes in the forms of vLLM."""
    return VectorServer(tmp_path, server__compatible="vllm", server__default_models=DENSE)


def answered(server: VectorServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The fields of an answer; its id and time have been looked at."""
    found = server.post(path, body)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json
    kind, _, number = answer.pop("id").partition("-")
    assert kind == {"/pooling": "pool", "/v1/score": "score"}.get(path, path[1:]) and len(number) == 32
    assert path == "/rerank" or isinstance(answer.pop("created"), int)
    assert all(lease.releases == 1 for lease in server.engine.leases)
    return answer


def refused(server: VectorServer, path: str, body: Any, status: int = 400) -> str:
    """The message of an error."""
    found = server.post(path, body)
    error = found.json["error"]
    assert found.status_code == status, found.text
    assert set(found.json) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (status, None)
    return str(error["message"])


def test_pooling(server: VectorServer) -> None:
    answer = answered(server, "/pooling", {"model": DENSE, "input": ["abc", "a"]})
    assert answer == {
        "object": "list",
        "model": DENSE,
        "data": [
            {"index": 0, "object": "pooling", "data": [3, 1, 0]},
            {"index": 1, "object": "pooling", "data": [1, 1, 0]},
        ],
        "usage": {"prompt_tokens": 2, "total_tokens": 2, **USAGE},
    }
    cut = {"input": [[7, 8]], "dimensions": 2, "encoding_format": "base64", "task": "embed"}
    [entry] = answered(server, "/pooling", cut)["data"]
    assert np.frombuffer(base64.b64decode(entry["data"]), "<f4").tolist() == [2, 1]
    assert "no vectors for the task token_embed" in refused(
        server, "/pooling", {"model": DENSE, "input": "a", "task": "token_embed"}
    )
    assert "token_classify" in refused(server, "/pooling", {"input": "a", "task": "token_classify"})
    assert "dimensions: 4 is outside 1..3" in refused(server, "/pooling", {"input": "a", "dimensions": 4})
    assert "org/nobody" in refused(server, "/pooling", {"model": "org/nobody", "input": "a"}, 404)


def test_long_inputs_are_cut_only_where_the_request_says_so(server: VectorServer) -> None:
    body = {"input": ["a", "x" * 41]}
    assert refused(server, "/pooling", body) == "inputs[1]: 41, the limit is 40"
    answered(server, "/pooling", {**body, "truncate_prompt_tokens": -1})
    assert "cannot cut texts" in refused(server, "/pooling", {**body, "truncate_prompt_tokens": 8})
    assert "-1" in refused(server, "/pooling", {**body, "truncate_prompt_tokens": -2})


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score_keeps_the_order_of_the_texts(server: VectorServer, path: str) -> None:
    answer = answered(server, path, {"text_1": ["q"], "text_2": ["a 1", "b 3"]})
    assert answer["model"] == SCORE and answer["data"] == [
        {"index": 0, "object": "score", "score": 1},
        {"index": 1, "object": "score", "score": 3},
    ]
    assert next(server.calls).options["activation"] == "sigmoid"
    answered(server, path, {"text_1": "q", "text_2": "2", "use_activation": False})
    assert next(server.calls).options["activation"] == "identity"
    found = server.post(path, {"text_1": ["q", "r"], "text_2": ["1", "2"]})
    assert found.status_code == 400 and "text_1: 2 texts" in found.json["error"]["message"]


def test_rerank_returns_the_best_documents(server: VectorServer) -> None:
    body = {"model": SCORE, "query": "q", "documents": ["a 1", "b 3", "c 2"]}
    answer = answered(server, "/rerank", {**body, "top_n": 2})
    assert answer["results"] == [
        {"index": 1, "document": {"text": "b 3"}, "relevance_score": 3},
        {"index": 2, "document": {"text": "c 2"}, "relevance_score": 2},
    ]
    assert len(answered(server, "/rerank", {**body, "top_n": 0})["results"]) == 3
    assert "documents: may not be empty" in refused(server, "/rerank", {**body, "documents": []})
    assert "does not support rerank" in refused(server, "/rerank", {**body, "model": DENSE})


def test_classify_gives_probabilities_in_the_order_of_the_labels(server: VectorServer) -> None:
    answer = answered(server, "/classify", {"input": ["a", "a b"]})
    assert (answer["model"], answer["data"]) == (
        CLASSIFIER,
        [
            {"index": 0, "label": LABELS[1], "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": LABELS[0], "probs": [0.75, 0.25], "num_classes": 2},
        ],
    )
    assert answered(server, "/classify", {"input": "a", "activation": False})["data"][0]["probs"] == [-1, 2]
    assert "is no classifier" in refused(server, "/classify", {"model": DENSE, "input": "a"})


def test_tokenize_and_detokenize(server: VectorServer) -> None:
    found = server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json
    assert found == {
        "count": 3,
        "max_model_len": 40,
        "tokens": [0, 97, 98],
        "token_strs": ["^", "a", "b"],
    }
    found = server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json
    assert (found["tokens"], found["token_strs"]) == ([97, 98], None)
    assert server.post("/detokenize", {"tokens": [0, 97]}).json == {"prompt": "^a"}
    assert "messages: conversations" in refused(server, "/tokenize", {"messages": [{"role": "user"}]})
    assert "prompt: missing" in refused(server, "/tokenize", {"model": DENSE})
    assert "tokens: may not be empty" in refused(server, "/detokenize", {"tokens": []})
    long = {"prompt": "x" * ((1 << 20) + 1)}
    assert "the limit is 1048576 (limits.max_text_bytes)" in refused(server, "/tokenize", long)
    many = {"tokens": [1] * ((1 << 18) + 1)}
    assert "262145 token ids in all, the limit is 262144" in refused(server, "/detokenize", many)
