"""The routes of TEI: whose model answers, what a request may say, the form of answers and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vector_server import CLASSIFIER, DENSE, SCORE, VectorServer

Make = Callable[..., VectorServer]
ODDS = (("odd", "even"), ("even", "odd"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a server; its answers must have ended when the test ends."""
    servers: list[VectorServer] = []

    def made(*more: str, **settings: Any) -> VectorServer:
        servers.append(VectorServer(tmp_path, *more, **{"server__compatible": "tei", **settings}))
        return servers[-1]

    yield made
    for server in servers:
        assert all(lease.releases == 1 for lease in server.engine.leases)


def refusal(response: Any) -> tuple[int, str, str]:
    """(status, error_type, error) of an error."""
    assert set(response.json) == {"error", "error_type"}, response.text
    return response.status_code, response.json["error_type"], response.json["error"]


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [("abc", [3]), (["abc", ""], [3, 0]), ([5, 6, 7, 8], [4]), ([[5, 6], [7]], [2, 1])],
)
def test_embed_gives_unit_vectors_of_every_kind_of_input(make: Make, inputs: Any, sizes: list[int]) -> None:
    response = make().post("/embed", {"inputs": inputs})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    for vector, size in zip(response.json, sizes, strict=True):
        assert vector == pytest.approx([size / math.hypot(size, 1), 1 / math.hypot(size, 1), 0])


def test_vectors_are_cut_before_they_are_made_of_length_1(make: Make) -> None:
    server = make()
    assert server.post("/embed", {"inputs": "abc", "dimensions": 1}).json == [[1]]
    assert server.post("/embed", {"inputs": "", "dimensions": 1}).json == [[0]]
    assert server.post("/embed", {"inputs": "abc", "normalize": False}).json == [[3, 1, 0]]
    assert server.post("/embed", {"inputs": "abc", "normalize": False, "dimensions": 2}).json == [[3, 1]]
    for wrong in (0, 4, -1):
        status, kind, text = refusal(server.post("/embed", {"inputs": "abc", "dimensions": wrong}))
        assert (status, kind) == (422, "Validation") and f"dimensions: {wrong}" in text


@pytest.mark.parametrize(
    ("fields", "overflow"),
    [
        ({"truncate": False, "truncation_direction": "left"}, "error"),
        ({}, "truncate"),
        ({"truncate": None, "truncation_direction": "left"}, "truncate_left"),
        ({"truncate": True}, "truncate"),
        ({"truncate": True, "truncation_direction": "Right"}, "truncate"),
        ({"truncate": True, "truncation_direction": "left"}, "truncate_left"),
    ],
)
def test_what_is_too_long_is_cut_unless_the_request_says_no(
    make: Make, fields: dict[str, Any], overflow: str
) -> None:
    server = make()
    assert server.post("/embed", {"inputs": "abc", **fields}).status_code == 200
    assert next(server.calls).overflow == overflow
    assert server.post("/rerank", {"query": "q", "texts": ["1"], **fields}).status_code == 200
    assert next(server.calls).overflow == overflow
    long = server.post("/embed", {"inputs": ["a", "x" * 41], **fields})
    if overflow == "error":
        assert refusal(long) == (422, "Validation", "inputs[1]: 41, the limit is 40")
    else:
        assert long.status_code == 200


def test_a_body_that_is_too_large_is_413(make: Make) -> None:
    found = refusal(make(limits__max_body_bytes=100).post("/embed", {"inputs": "x" * 100}))
    assert found[:2] == (413, "Validation") and "limits.max_body_bytes" in found[2]


def test_a_prompt_goes_to_the_model_which_knows_its_side(make: Make) -> None:
    server = make()
    for name in ("query", "document", "sts", None):
        found = server.post("/embed", {"inputs": "a", "prompt_name": name, "normalize": False})
        assert found.json == [[1, 1, 0]]
        assert next(server.calls).options.get("prompt_name") == name
        sentences = {"source_sentence": "abc", "sentences": ["abc", ""]}
        found = server.post("/similarity", {"inputs": sentences, "parameters": {"prompt_name": name}})
        assert found.json[0] == pytest.approx(1) and next(server.calls).options.get("prompt_name") == name
    status, kind, text = refusal(server.post("/embed", {"inputs": "a", "prompt_name": 1}))
    assert (status, kind) == (422, "Validation") and "prompt_name" in text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": []},
        {"inputs": [1, "a"]},
        {"inputs": [[]]},
        {"inputs": [-1]},
        {"inputs": {"text": "a"}},
        {"inputs": "a", "truncate": "yes"},
        {"inputs": "a", "truncation_direction": "up"},
        b"{",
        b"",
        b'{"inputs": "a", "inputs": "b"}',
    ],
)
def test_wrong_requests_are_refused_in_the_form_of_tei(make: Make, body: Any) -> None:
    status, kind, text = refusal(make().post("/embed", body))
    assert (status, kind) == (422, "Validation") and text


def test_a_prompt_is_not_left_out_of_tokens_in_silence(make: Make) -> None:
    server = make(served=(DENSE,))
    assert server.post("/tokenize", {"inputs": "a", "prompt_name": None}).status_code == 200
    status, kind, text = refusal(server.post("/tokenize", {"inputs": "a", "prompt_name": "query"}))
    assert (status, kind) == (422, "Validation") and "prompt_name: not offered here" in text


def test_rerank_orders_texts(make: Make) -> None:
    server = make()
    texts = ["a 1", "b 3", "c 2", "d 3"]
    found = server.post("/rerank", {"query": "q", "texts": texts})
    assert found.json == [
        {"index": index, "score": score} for index, score in ((1, 3), (3, 3), (2, 2), (0, 1))
    ]
    found = server.post("/rerank", {"query": "q", "texts": texts[:2], "return_text": True})
    assert found.json == [{"index": 1, "text": "b 3", "score": 3}, {"index": 0, "text": "a 1", "score": 1}]
    for wrong in ({"query": "q", "texts": []}, {"query": "q"}, {"query": 1, "texts": ["1"]}):
        assert refusal(server.post("/rerank", wrong))[:2] == (422, "Validation")


ODD, EVEN = ([{"score": 0.75, "label": one}, {"score": 0.25, "label": other}] for one, other in ODDS)


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ("a b", EVEN),
        (["a"], ODD),
        (["a", "b"], EVEN),
        ([["a"], ["a", "b"], ["a b", "c"], ["", ""]], [ODD, EVEN, ODD, EVEN]),
    ],
)
def test_predict_takes_texts_and_pairs(make: Make, inputs: Any, wanted: Any) -> None:
    server = make()
    assert server.post("/predict", {"inputs": inputs}).json == wanted
    last = next(server.calls).items[-1]
    assert (last.first is not None) == (inputs not in ("a b", ["a"]))


WRONG_PAIRS: list[tuple[Any, str]] = [
    ({"inputs": []}, "inputs: may not be empty"),
    ({"inputs": [[]]}, "inputs[0]: 0 texts, expected one text or a pair"),
    ({"inputs": ["a", "b", "c"]}, "inputs: 3 texts"),
    ({"inputs": [["a", "b"], ["a", "b", "c"]]}, "inputs[1]: 3 texts"),
    ({"inputs": [["a"], "b"]}, "inputs[1]: expected an array"),
    ({"inputs": ["a", ["b"]]}, "inputs: expected an array"),
    ({"inputs": [["a", None]]}, "inputs[0][1]"),
    ({"inputs": [["a", ["b"]]]}, "inputs[0][1]"),
    ({"inputs": {"text": "a", "text_pair": "b"}}, "inputs"),
    ({"inputs": [["a", "b"]] * 10_001}, "inputs: 10001 given, the limit is 10000"),
    ({"inputs": [["a", "b"]] * 100_000}, "inputs: 100000 given"),
    ({"inputs": ["x" * ((1 << 20) + 1), "b"]}, "inputs[0]: 1048577 bytes"),
    (b'{"inputs": ["a", "\\udfff"]}', "inputs[1]: \\udfff is half of a character"),
    (b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}", "inputs"),
]


def test_wrong_pairs_are_refused(make: Make) -> None:
    server = make()
    for body, said in WRONG_PAIRS:
        status, kind, text = refusal(server.post("/predict", body))
        assert (status, kind) == (422, "Validation") and said in text


def test_predict_of_a_reranker_gives_its_one_class(make: Make) -> None:
    server = make(served=(DENSE, SCORE))
    [alone] = server.post("/predict", {"inputs": ["ab", "c 3"]}).json
    assert alone == {"score": pytest.approx(3.2), "label": "LABEL_0"}
    found = server.post("/predict", {"inputs": [["", "d 2"], ["ab", "c 3"]], "raw_scores": True}).json
    assert [[one["score"] for one in classes] for classes in found] == [[2], [pytest.approx(3.2)]]
    call = next(server.calls)
    assert (call.overflow, call.options["activation"]) == ("truncate", "identity")
    for inputs, said in (("a", "inputs: "), (["a"], "inputs: "), ([["a", "b"], ["c"]], "inputs[1]: ")):
        status, kind, text = refusal(server.post("/predict", {"inputs": inputs}))
        assert (status, kind) == (422, "Validation") and text.startswith(
            f"{said}model '{SCORE}' scores pairs"
        )
    status, kind, text = refusal(make(served=(DENSE,)).post("/predict", {"inputs": ["a", "b"]}))
    assert (status, kind) == (424, "Backend") and "no served model gives json" in text


def test_the_only_model_that_can_answer_does(make: Make) -> None:
    server = make(served=(DENSE,))
    assert server.post("/embed", {"inputs": "a", "model": "ignored"}).status_code == 200
    status, kind, text = refusal(server.post("/rerank", {"query": "q", "texts": ["1"]}))
    assert (status, kind) == (424, "Backend") and "no served model gives score" in text
    assert server.client.simulate_get("/info").json["model_id"] == DENSE
    server = make(served=(CLASSIFIER,))
    assert server.post("/predict", {"inputs": "a b"}).json[0] == {"score": 0.75, "label": "even"}
    labels = {"id2label": {"0": "even", "1": "odd"}, "label2id": {"even": 0, "odd": 1}}
    assert server.client.simulate_get("/info").json["model_type"] == {"classifier": labels}


@pytest.mark.parametrize(
    ("model", "body", "route"),
    [
        (DENSE, {"inputs": "abc"}, "/embed"),
        (SCORE, {"query": "q", "texts": ["a 1", "b 3"]}, "/rerank"),
        (CLASSIFIER, {"inputs": [["a", "b"]]}, "/predict"),
    ],
)
def test_invocations_are_those_of_the_task_of_the_model(
    make: Make, model: str, body: dict[str, Any], route: str
) -> None:
    server = make(server__default_models=model)
    found, wanted = server.post("/invocations", body), server.post(route, body)
    assert (found.status_code, found.json) == (200, wanted.json)
    status, kind, text = refusal(server.post("/invocations", {"inputs": {}, "query": "q", "texts": 1}))
    assert (status, kind) == (422, "Validation") and text
    assert server.client.simulate_get("/invocations").status_code == 405


def test_invocations_need_a_choice(make: Make) -> None:
    status, kind, text = refusal(make().post("/invocations", {"inputs": "a"}))
    assert (status, kind) == (424, "Backend") and "server.default_models chooses one" in text
    unchosen = make(server__compatible="").post("/invocations", {"inputs": "a"})
    assert unchosen.status_code == 501 and "tei:/invocations" in unchosen.json["detail"]["message"]


def test_several_models_need_a_choice(make: Make) -> None:
    status, kind, text = refusal(make("org/other").post("/embed", {"inputs": "a"}))
    assert (status, kind) == (424, "Backend")
    assert f"several give dense: {DENSE}, org/other; server.default_models chooses one" in text
    server = make("org/other", server__default_models=f"{SCORE},org/other")
    assert server.post("/embed", {"inputs": "a"}).status_code == 200
    assert server.engine.works[-1].model == "org/other"
    assert server.post("/rerank", {"query": "q", "texts": ["1"]}).status_code == 200
    info = server.client.simulate_get("/info").json
    assert (info["model_id"], info["model_type"]) == (SCORE, {"reranker": {"id2label": {}, "label2id": {}}})
    assert info["auto_truncate"] is True and info["served_model_name"] == SCORE
    assert info["max_input_length"] == 40 and info["max_client_batch_size"] == 10000


def test_a_route_of_several_servers_needs_a_choice_too(make: Make) -> None:
    server = make(server__compatible="")
    found = server.post("/rerank", {"query": "q", "texts": ["1"]})
    assert found.status_code == 501
    assert "set server.compatible to tei:/rerank or vllm:/rerank" in found.json["detail"]["message"]
    assert server.post("/embed", {"inputs": "a"}).status_code == 200
    assert make(server__compatible="tei:/rerank").post("/rerank", {"query": "q", "texts": ["1"]}).json == [
        {"index": 0, "score": 1}
    ]
