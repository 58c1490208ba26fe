"""A body that names a model and has a mistake elsewhere counts for that model, over every protocol of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.http.fields import model_in
from frontend.records.finishing import Finisher
from tests.fakes.generation_server import CHAT, DENSE, RecordedServer

LONG = "x" * (600 << 10)
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT, {"messages": 5}),
    ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 0}),
    ("/v1/chat/completions", CHAT, {"messages": {"role": LONG}}),
    ("/v1/completions", CHAT, {"prompt": {}}),
    ("/v1/completions", CHAT, {"prompt": "hi", "best_of": -1}),
    ("/v1/responses", CHAT, {"input": 5}),
    ("/v1/messages", CHAT, {"messages": [], "max_tokens": "many"}),
    ("/v1/messages/count_tokens", CHAT, {"messages": 1}),
    ("/v1/embeddings", DENSE, {"input": {"no": "text"}}),
    ("/v1/embeddings", DENSE, {"input": LONG, "dimensions": "few"}),
    ("/v1/rerank", DENSE, {"query": 5, "documents": []}),
]


@pytest.fixture
def server(tmp_path: Path) -> RecordedServer:
    return RecordedServer(tmp_path)


@pytest.fixture
def counted(server: RecordedServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model that each request counts for."""
    found: list[str] = []
    monkeypatch.setattr(Finisher, "finish", lambda _, scope, *__: found.append(scope.model))
    return found


@pytest.mark.parametrize(("path", "model", "body"), REFUSED)
def test_a_refused_body_counts_for_the_model_that_it_names(
    server: RecordedServer, counted: list[str], path: str, model: str, body: dict[str, Any]
) -> None:
    assert server.post(path, {**body, "model": model}).status_code in (400, 422)
    assert counted == [model]


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        ("/api/chat", CHAT, {"messages": 5}),
        ("/api/generate", CHAT, {"prompt": 5}),
        ("/api/embed", DENSE, {"input": 5}),
        ("/api/embeddings", DENSE, {"prompt": 5}),
    ],
)
def test_a_refused_body_of_ollama_counts_for_the_model_without_its_tag(
    server: RecordedServer, counted: list[str], path: str, model: str, body: dict[str, Any]
) -> None:
    assert server.post(path, {**body, "model": f"{model}:latest"}).status_code == 400
    assert counted == [model]


@pytest.mark.parametrize("named", ["nobody", 5, None])
def test_a_refused_body_that_names_no_model_of_generated_text_counts_for_none(
    server: RecordedServer, counted: list[str], named: Any
) -> None:
    assert server.post("/v1/chat/completions", {"messages": 1, "model": named}).status_code == 422
    assert counted == [""]


@pytest.mark.parametrize("operation", ["encode", "score", "extract"])
@pytest.mark.parametrize("body", [{}, b"{", {"query": {"text": "a"}, "items": [{"text": "a"}]}])
def test_a_path_without_a_model_is_404_whatever_the_body(
    server: RecordedServer, operation: str, body: Any
) -> None:
    response = server.post(f"/v1/{operation}/", body)
    assert (response.status_code, response.json["detail"]["code"]) == (404, "MODEL_NOT_FOUND")
    assert "the path names no model" in response.json["detail"]["message"]


def test_the_model_is_found_in_json_and_in_msgpack_and_in_nothing_else() -> None:
    body = {"model": "a/b", "items": 5}
    assert model_in(msgspec.json.encode(body)) == "a/b"
    assert model_in(msgspec.msgpack.encode(body), binary=True) == "a/b"
    for raw in (b"", b"{", b"[]", b'{"model": 5}', b'{"model": "a"', b"[" * 100_000):
        assert model_in(raw) == model_in(raw, binary=True) == ""
