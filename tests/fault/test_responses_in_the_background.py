"""Responses in the background while frontends are reloaded and killed, and while their worker dies."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import orjson
import pytest

from tests.fault import serving
from tests.harness.server import Server, alive, wait_until
from tests.tiny import chat_models

MODEL = "tiny/chat"
_ENTRY = """\
id: tiny/chat
source: {kind: directory, path: model}
adapter: causal
inputs: [text]
outputs: {chat: {}}
"""
TOKENS, MANY_TOKENS = 400, 1900
"""Two seconds of work, or so, and much more than a test waits for."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends and a tiny chat model."""
    place = tmp_path_factory.mktemp("background")
    chat_models.save("chatml", place / "catalog" / "model")
    (place / "catalog" / "chat.yaml").write_text(_ENTRY)
    settings = {"server.frontends": 2, "limits.restart_wait_s": 120, "limits.load_wait_s": 120}
    with serving(place, (MODEL,), settings=settings, catalog=place / "catalog") as running:
        yield running


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    """What the model says, as long as nothing happens."""
    answer = httpx.post(f"{server.url}/v1/responses", json=_ask(), timeout=60).json()
    assert answer["status"] == "incomplete"
    return str(answer["output_text"])


def _ask(**fields: Any) -> dict[str, Any]:
    return {"input": "tell", "max_output_tokens": TOKENS, "ignore_eos": True} | fields


def _get(server: Server, id_: str) -> Any:
    return server.get(f"/v1/responses/{id_}").json()


def _started(server: Server, tokens: int) -> str:
    """A response at work. On a busy machine a response may have ended before the first look; then comes another."""
    status = ""
    while status != "in_progress":
        asked = _ask(background=True, max_output_tokens=tokens)
        id_ = str(server.post("/v1/responses", asked).json()["id"])
        wait_until(
            lambda seen=id_: _get(server, seen)["status"] != "queued", what="the beginning of the work"
        )
        status = _get(server, id_)["status"]
        assert status in ("in_progress", "incomplete"), status
    return id_


def _ended(server: Server, id_: str) -> Any:
    """The response, once it has ended."""
    wait_until(
        lambda: _get(server, id_)["status"] not in ("queued", "in_progress"), what="the end of the work"
    )
    return _get(server, id_)


def _runner(server: Server, id_: str) -> int:
    """The frontend that runs a response."""
    [place] = (server.run_dir / "state").glob("*.db")
    with closing(sqlite3.connect(place)) as connection:
        [runner] = connection.execute("SELECT runner FROM responses WHERE id = ?", (id_,)).fetchone()
    return int(runner.split()[1])


def assert_begins(said: str, text: str) -> None:
    """Both are beginnings of one text, but for the last character, which may have been cut."""
    shared = min(len(said), len(text)) - 1
    assert said[:shared] == text[:shared]


def test_a_reload_lets_a_run_end(server: Server, text: str) -> None:
    before = set(server.frontend_pids())
    id_ = _started(server, TOKENS)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: not before & set(server.frontend_pids()), what="the new frontends")
    answer = _ended(server, id_)
    assert (answer["status"], answer["output_text"]) == ("incomplete", text)
    assert answer["usage"]["output_tokens"] == TOKENS
    wait_until(lambda: not any(map(alive, before)), what="the end of the old frontends")
    told = httpx.get(f"{server.url}/v1/responses/{id_}?stream=true", timeout=60).text
    events = [orjson.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    deltas = (event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert "".join(deltas) == text
    assert events[-1]["response"] == answer


def test_a_run_of_a_killed_frontend_has_failed(server: Server, text: str) -> None:
    id_ = _started(server, MANY_TOKENS)
    os.kill(_runner(server, id_), signal.SIGKILL)
    answer = _ended(server, id_)
    assert (answer["status"], answer["error"]["type"]) == ("failed", "internal_error")
    assert_begins(answer["output_text"], text)
    wait_until(lambda: len(server.frontend_pids()) == 2, what="the new frontend")


def test_a_run_of_a_killed_worker_goes_on_when_the_worker_is_back(server: Server, text: str) -> None:
    id_ = _started(server, MANY_TOKENS)
    os.kill(wait_until(server.worker_pid), signal.SIGKILL)
    answer = _ended(server, id_)
    assert answer["status"] == "incomplete" and answer["usage"]["output_tokens"] == MANY_TOKENS
    assert answer["output_text"].startswith(text)
