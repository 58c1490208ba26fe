"""The routes of ollama without its client: bodies that no client sends, hostile ones, paths that nobody has."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from frontend.engine.events import Called, Finished, Started, Text
from tests.fakes.generation_server import CHAT, ENDED, RecordedServer

HI = [{"role": "user", "content": "hi"}]
CHAT_PATH, GENERATE = "/api/chat", "/api/generate"
SILENT: dict[str, str] = {"generation__keep_alive_s": "0.05"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> RecordedServer:
    """A server that answers "Hello you"."""
    return RecordedServer(tmp_path_factory.mktemp("routes"))


def test_a_body_needs_no_content_type_and_no_model(server: RecordedServer) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        answer = server.post(GENERATE, {"prompt": "hi", "stream": False}, **{"Content-Type": kind})
        assert (answer.status_code, answer.json["model"], answer.json["response"]) == (200, CHAT, "Hello you")


def test_lines_are_json_of_their_own_media_type(server: RecordedServer) -> None:
    answer = server.post(CHAT_PATH, {"messages": HI})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [orjson.loads(line) for line in answer.content.splitlines()]
    assert [line["done"] for line in lines] == [False, False, True]
    assert "done_reason" not in lines[0] and "total_duration" not in lines[0]


def test_a_silent_stream_goes_on_with_lines_that_clients_can_read(tmp_path: Path) -> None:
    server, gate = RecordedServer(tmp_path, **SILENT), threading.Event()
    server.script([[Started(4)], gate, [Text(0, "late"), Finished(0, "stop"), ENDED]])
    with server.listening() as url:
        lines = asyncio.run(_read(url, gate))
    assert lines[0]["message"]["content"] == "" and not lines[0]["done"]
    assert "".join(line["message"]["content"] for line in lines) == "late" and lines[-1]["done"]


async def _read(url: str, gate: threading.Event) -> list[Any]:
    """The lines of a stream, whose model speaks after the first line."""
    lines = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}{CHAT_PATH}", json={"messages": HI}) as answer,
    ):
        async for line in answer.aiter_lines():
            gate.set()
            lines.append(orjson.loads(line))
    return lines


def test_arguments_of_calls_keep_their_digits(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path)
    long = "123456789012345678901234567890"
    server.script(
        [
            [Started(4)],
            [*Called(0, 0, "c", "f", f'{{"n":{long}}}').events(), Finished(0, "tool_calls"), ENDED],
        ]
    )
    answer = server.post(CHAT_PATH, {"messages": HI, "stream": False})
    assert f'"arguments":{{"n":{long}}}' in answer.text


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT_PATH, b"", "body: empty"),
        (CHAT_PATH, b"{", "malformed JSON"),
        (CHAT_PATH, b"[" * 5000, "body: expected object, got array"),
        (CHAT_PATH, {"messages": 5}, "messages: expected"),
        (
            CHAT_PATH,
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages[0].role: 'robot' is not one of",
        ),
        (CHAT_PATH, {"messages": [{"role": "user"}]}, "messages[0].content: may be absent only"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "a\0"}]}, "messages[0].content: holds a NUL"),
        (CHAT_PATH, {"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (CHAT_PATH, {"messages": HI, "format": "xml"}, "format: expected 'json' or a JSON schema"),
        (CHAT_PATH, {"messages": HI, "think": "loud"}, "think: 'loud' is not one of"),
        (CHAT_PATH, {"messages": HI, "options": {"stop": [""]}}, "options.stop[0]: may not be empty"),
        (CHAT_PATH, {"messages": HI, "options": {"mirostat": 2}}, "options.mirostat: 2 is not offered"),
        (CHAT_PATH, {"messages": HI, "options": {"typical_p": 0.5}}, "options.typical_p: 0.5 is not"),
        (CHAT_PATH, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs: 21 is not in"),
        (GENERATE, {"prompt": "a", "context": [1, 2]}, "context: the server keeps no conversations"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template: the model has a template"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix: no model here fills in"),
        (GENERATE, {"prompt": "a", "images": ["aGk="]}, "images[0]: the model 'tiny/chat' takes text only"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, "system: cannot be used together with raw"),
        (GENERATE, {"prompt": "a\0", "raw": True}, "prompt: holds a NUL"),
        (GENERATE, {"keep_alive": "0s"}, "keep_alive: no model is unloaded"),
        ("/api/show", {}, "model: is required"),
        ("/api/embed", {"input": []}, "input: may not be empty"),
        ("/api/embed", {"input": 5}, "body: Expected"),
        ("/api/embeddings", {"model": CHAT, "prompt": "a"}, "has no dense output"),
    ],
)
def test_what_is_refused_names_the_field(server: RecordedServer, path: str, body: Any, text: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and set(answer.json) == {"error"}, answer.text
    assert text in answer.json["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api", 404),
        ("GET", "/api/", 404),
        ("POST", "/api/nothing", 404),
        ("POST", "/api/chat/", 404),
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
    ],
)
def test_unknown_paths_and_wrong_verbs_are_answered_in_words(
    server: RecordedServer, method: str, path: str, status: int
) -> None:
    answer = server.client.simulate_request(method, path)
    assert answer.status_code == status
    assert ("docs/ollama.md" if status == 404 else "does not answer to this method") in answer.json["error"]


def test_a_last_message_of_the_assistant_is_continued(server: RecordedServer) -> None:
    server.post(CHAT_PATH, {"messages": [*HI, {"role": "assistant", "content": "It is"}], "stream": False})
    assert server.engine.calls[-1].continues_text
