"""The routes of vLLM: which model answers, the forms of answers and errors, what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frontend.protocols.vllm.contract import SIDES
from tests.fakes import vector_server
from tests.fakes.vector_server import CHAT, CLASSIFIER, DENSE, LABELS, SCORE, VectorServer

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
    answered(server, "/pooling", {**body, "truncate_prompt_tokens": -1, "truncation_side": "left"})
    assert next(server.calls).overflow == "truncate_left"
    for path, wrong in (
        ("/pooling", body),
        ("/classify", body),
        ("/score", {"text_1": "q", "text_2": "1"}),
        ("/rerank", {"model": SCORE, "query": "q", "documents": ["1"]}),
    ):
        said = refused(server, path, {**wrong, "truncate_prompt_tokens": 8})
        assert said.startswith("truncate_prompt_tokens: model ") and "cannot cut texts" in said
        assert "truncate_prompt_tokens: 0" in refused(server, path, {**wrong, "truncate_prompt_tokens": 0})
    assert "-1" in refused(server, "/pooling", {**body, "truncate_prompt_tokens": -2})


def test_a_body_that_is_too_large_is_told_its_limit(tmp_path: Path) -> None:
    small = VectorServer(tmp_path, server__compatible="vllm", limits__max_body_bytes=100)
    said = refused(small, "/pooling", {"input": "x" * 100}, 413)
    assert said == "body: 112 bytes, the limit is 100 (limits.max_body_bytes)"


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


@pytest.mark.parametrize(("first", "second"), SIDES)
def test_score_compares_lists_of_one_length_pair_by_pair(
    server: VectorServer, first: str, second: str
) -> None:
    body = {first: ["q", "long", ""], second: ["a 1", "b 3", "c 2"]}
    found = [entry["score"] for entry in answered(server, "/score", body)["data"]]
    assert found == pytest.approx([1.1, 3.4, 2.0])
    call = next(server.calls)
    assert [item.first for item in call.items] == ["q", "long", ""] and call.query.text == ""
    assert (call.names.query, call.names.text) == (f"{first}[{{}}]", f"{second}[{{}}]")
    answered(server, "/score", {first: "q", second: "1"})
    call = next(server.calls)
    assert (call.query.text, call.items[0].first, call.names.query) == ("q", None, first)


WRONG_PAIRS: list[tuple[Any, str]] = [
    ({"text_1": ["q", "r"], "text_2": ["1"]}, "text_1: 2 texts, expected 1, or 1 as in text_2"),
    ({"text_1": ["q", "r"], "text_2": ["1", "2", "3"]}, "text_1: 2 texts, expected 1, or 3 as in text_2"),
    ({"text_1": [], "text_2": ["1"]}, "text_1: 0 texts"),
    ({"text_1": [], "text_2": []}, "text_2: may not be empty"),
    ({"queries": ["q"], "documents": []}, "documents: may not be empty"),
    ({"text_1": "q"}, "text_1 and text_2: expected one pair of fields, got 0"),
    ({"queries": "q", "text_2": "1"}, "got 0"),
    ({"queries": "q", "documents": "1", "items": "1"}, "got 2"),
    ({"text_1": ["q"] * 10_001, "text_2": ["1"] * 10_001}, "text_2: 10001 given, the limit is 10000"),
    ({"text_1": ["q"] * 100_001, "text_2": "1"}, "text_1: 100001 texts, expected 1"),
    ({"text_1": ["q", "x" * (1 << 20) + "x"], "text_2": ["1", "2"]}, "text_1[1]: 1048577 bytes"),
    ({"text_1": [["q"], ["r"]], "text_2": ["1", "2"]}, "text_1"),
    ({"text_1": ["q", None], "text_2": ["1", "2"]}, "text_1[1]"),
    ({"text_1": {"content": []}, "text_2": "1"}, "text_1"),
    (b'{"text_1": ["\\ud800", "b"], "text_2": ["1", "2"]}', "text_1[0]: \\ud800 is half"),
    (b'{"text_1": ' + b"[" * 2000 + b"]" * 2000 + b', "text_2": "1"}', "text_1"),
    (b'{"text_1": "a", "text_1": "b", "text_2": "1"}', "occurs twice"),
]


def test_wrong_pairs_are_refused(server: VectorServer) -> None:
    for body, said in WRONG_PAIRS:
        assert said in refused(server, "/score", body)


def test_rerank_returns_the_best_documents(server: VectorServer) -> None:
    body = {"model": SCORE, "query": "q", "documents": ["a 1", "b 3", "c 2"]}
    answer = answered(server, "/rerank", {**body, "top_n": 2})
    assert answer["results"] == [
        {"index": 1, "document": {"text": "b 3"}, "relevance_score": 3},
        {"index": 2, "document": {"text": "c 2"}, "relevance_score": 2},
    ]
    assert len(answered(server, "/rerank", {**body, "top_n": 0})["results"]) == 3
    assert len(answered(server, "/rerank", {**body, "documents": "a 1"})["results"]) == 1
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
    assert len(answered(server, "/classify", {"input": [[5, 6], [7]]})["data"]) == 2
    assert [item.ids for item in next(server.calls).items] == [[5, 6], [7]]
    assert "got a mix" in refused(server, "/classify", {"input": ["a", 1]})
    assert "input[1]: may not be empty" in refused(server, "/classify", {"input": [[1], []]})


def test_classes_of_another_model_than_that_of_the_plan_are_no_answer(
    server: VectorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_server, "LABELS", ["even", "prime"])
    assert "was replaced by another" in refused(server, "/classify", {"input": "a"}, 503)


@pytest.mark.parametrize(
    "field",
    [
        {"add_special_tokens": False},
        {"embed_dtype": "float16"},
        {"endianness": "big"},
        {"padding": "max_length"},
    ],
)
def test_fields_that_would_change_the_answer_are_refused(server: VectorServer, field: dict[str, Any]) -> None:
    [name] = field
    assert name in refused(server, "/pooling", {"input": "a", **field})


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
    assert "send one of them" in refused(server, "/tokenize", {"model": DENSE})
    assert "tokens: may not be empty" in refused(server, "/detokenize", {"tokens": []})
    long = {"prompt": "x" * ((1 << 20) + 1)}
    assert "the limit is 1048576 (limits.max_text_bytes)" in refused(server, "/tokenize", long)
    many = {"tokens": [1] * ((1 << 18) + 1)}
    assert "262145 token ids in all, the limit is 262144" in refused(server, "/detokenize", many)


SAID = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
WRONG_CONVERSATIONS: list[tuple[Any, str]] = [
    ({"messages": []}, "messages: may not be empty"),
    ({"messages": SAID, "prompt": "a"}, "send only one"),
    ({"messages": SAID, "model": DENSE}, "answers no conversations"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: may be absent only"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"content": "a"}]}, "role"),
    ({"messages": [{"role": "user", "content": "\0"}]}, "messages[0].content: holds a NUL"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x" * ((1 << 20) + 1)}]}, "limits.max_text_bytes"),
    ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "more than 10000 messages"),
    (
        {"messages": SAID, "continue_final_message": True, "add_generation_prompt": True},
        "cannot be true beside",
    ),
    ({"messages": SAID, "add_special_tokens": True}, "add_special_tokens: not offered"),
    ({"messages": SAID, "chat_template": "{{ 1 }}"}, "chat_template: not offered"),
    ({"messages": SAID, "chat_template_kwargs": {"enable_thinking": 3}}, "enable_thinking"),
    ({"messages": SAID, "tools": [1]}, "tools[0]"),
    ({"messages": SAID, "tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "messages[0].content: \\udc00 is half"),
    (b'{"messages": [{"role": "user", "content": ' + b"[" * 3000 + b"]" * 3000 + b"}]}", "nested too deeply"),
]


def test_tokenize_renders_conversations(tmp_path: Path) -> None:
    server = VectorServer(tmp_path, served=(DENSE, CHAT), server__compatible="vllm")
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    body = {"messages": SAID, "tools": [{"type": "function", "function": function}]}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    found = server.post("/tokenize", {**body, "return_token_strs": True})
    assert found.json == {
        "count": 3,
        "max_model_len": 40,
        "tokens": [0, 97, 98],
        "token_strs": ["^", "a", "b"],
    }
    prompt = next(server.calls).prompt
    assert prompt.messages[1] == {"role": "user", "content": "b"}
    assert prompt.tools.functions == [{"type": "function", "function": function}]
    assert prompt.variables == {"enable_thinking": False}
    server.post("/tokenize", {"messages": SAID, "add_generation_prompt": False, "model": CHAT})
    assert next(server.calls).prompt.variables == {"add_generation_prompt": False}
    server.post("/tokenize", {"messages": SAID, "continue_final_message": True, "model": CHAT})
    continuing = {"add_generation_prompt": False, "continue_final_message": True}
    assert next(server.calls).prompt.variables == continuing
    for wrong, said in WRONG_CONVERSATIONS:
        assert said in refused(server, "/tokenize", wrong), wrong
