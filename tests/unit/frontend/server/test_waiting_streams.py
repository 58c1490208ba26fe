"""Streams at their ends: they open while a request waits, and a later failure or the end of a drain is their error."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import falcon.asgi
import httpx
import pytest

from frontend.engine.events import Started, Text
from frontend.protocols.kserve_v2 import generate
from frontend.scope import plain_scope
from frontend.sending import COMMENT
from frontend.server.drain import Drain
from ipc.errors import DeadlineExceeded, InferenceFailed, ModelNotFound, PenstockError, QueueFull
from tests.fakes.generation_server import RecordedServer
from tests.fakes.tensors import services_of
from tests.harness.server import wait_until

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": "hi"},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
OPENINGS = {
    "/v1/responses": ["response.created", "response.in_progress"],
    "/v1/messages": ["message_start"],
}
"""Names of the events that open a stream; the other protocols open with a comment."""
LASTS = {
    "/v1/chat/completions": ["error", "[DONE]"],
    "/v1/completions": ["error", "[DONE]"],
    "/v1/responses": ["response.failed", "[DONE]"],
    "/v1/messages": ["error"],
}


@contextmanager
def asking(url: str, path: str, **more: Any) -> Iterator[http.client.HTTPResponse]:
    """The response of a stream, once its head is there."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        body = json.dumps({"stream": True, **BODIES[path], **more})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        yield connection.getresponse()
    finally:
        connection.close()


def names(told: bytes) -> list[str]:
    """What the events of a stream are called: by name, an error without a name, the mark of the end; no pings."""
    found = []
    for block in told.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            data = fields["data"]
            unnamed = data if data == "[DONE]" else "error" if "error" in json.loads(data) else "chunk"
            found.append(fields.get("event", unnamed))
    return [name for name in found if name != "ping"]


def drained(drain: Drain, response: http.client.HTTPResponse, text: bytes) -> bytes:
    """All bytes of the only stream of a server whose drain is over as soon as `text` has come."""
    told = b""
    while text not in told:
        told += response.read1()
    [stop] = drain.streams
    stream: Any = stop.__self__  # type: ignore[attr-defined]
    stream._reader._loop.call_soon_threadsafe(drain.end)
    return told + response.read()


@pytest.fixture
def server(tmp_path: Path) -> RecordedServer:
    """Requests of this server stand in the queue until a test opens the queue."""
    found = RecordedServer(tmp_path, generation__keep_alive_s="0.01")
    found.engine.queue.clear()
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_opens_while_its_request_waits_and_then_goes_on(server: RecordedServer, path: str) -> None:
    with server.listening() as url, asking(url, path) as response:
        assert response.status == 200, "the head came while the request waits"
        told = b""
        while told.count(COMMENT) < 2:
            told += response.read1()
        assert names(told) == OPENINGS.get(path, [])
        server.engine.queue.set()
        told += response.read()
    whole = names(told)
    assert whole[: len(OPENINGS.get(path, []))] == OPENINGS.get(path, [])
    assert [name for name in whole if name in ("message_start", "response.created")] in ([], whole[:1])
    assert whole[-1] in ("[DONE]", "message_stop") and "error" not in whole
    assert b"Hello" in told and b" you" in told


@pytest.mark.parametrize("path", BODIES)
def test_what_fails_after_the_wait_is_the_one_error_of_the_stream(server: RecordedServer, path: str) -> None:
    server.script(DeadlineExceeded("the deadline passed before the first token"))
    with server.listening() as url, asking(url, path) as response:
        assert response.status == 200
        server.engine.queue.set()
        assert names(response.read()) == [*OPENINGS.get(path, []), *LASTS[path]]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("error", [QueueFull("full", retry_after_s=3), InferenceFailed("not finite")])
def test_a_refusal_that_is_known_at_once_stays_a_status(
    tmp_path: Path, path: str, error: PenstockError
) -> None:
    server = RecordedServer(tmp_path, generation__keep_alive_s="60")
    server.script(error)
    response = server.post(path, {"stream": True, **BODIES[path]})
    assert response.status_code == error.status
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_stays_a_status_whatever_waits(server: RecordedServer, path: str) -> None:
    response = server.post(path, {"stream": True, **BODIES[path], "model": "nobody/has-it"})
    assert response.status_code == ModelNotFound("").status


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_opens_while_its_model_is_loading(
    server: RecordedServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = server.engine.queue

    async def loading(*_: Any, **__: Any) -> Any:
        await asyncio.to_thread(loaded.wait)
        raise ModelNotFound("the model left on the way")

    monkeypatch.setattr(server.services.directory, "ensure_loaded", loading)
    with server.listening() as url, asking(url, path) as response:
        assert response.status == 200
        loaded.set()
        assert names(response.read())[len(OPENINGS.get(path, [])) :][0] == "error"


def test_message_start_has_the_tokens_of_a_prompt_that_is_tokenized_and_0_before(
    server: RecordedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usages(told: bytes) -> list[Any]:
        found = [json.loads(line[6:]) for line in told.decode().split("\n") if line.startswith("data: ")]
        messages = [each.get("message", each) for each in found]
        return [each["usage"] for each in messages if "usage" in each]

    last = {"input_tokens": 4, "output_tokens": 2}
    with server.listening() as url, asking(url, "/v1/messages") as response:
        server.engine.queue.set()
        assert usages(response.read()) == [{"input_tokens": 0, "output_tokens": 0}, last]
    monkeypatch.setattr("tests.fakes.generation.RecordedGeneration.prompt_tokens", 4)
    with server.listening() as url, asking(url, "/v1/messages") as response:
        assert usages(response.read()) == [{"input_tokens": 4, "output_tokens": 0}, last]


def test_a_stream_of_tensors_opens_with_a_comment_and_ends_with_what_fails_later(tmp_path: Path) -> None:
    services = services_of(tmp_path, [], [], generation__keep_alive_s="0.01")
    req: Any = SimpleNamespace(path="/v2/models/m/generate_stream", method="POST", uri_template="", scope={})
    req.context = SimpleNamespace(penstock=plain_scope())
    failing = asyncio.Event()

    async def texts() -> AsyncGenerator[bytes, None]:
        await failing.wait()
        raise InferenceFailed("not finite")
        yield b""

    async def act() -> list[bytes]:
        resp = falcon.asgi.Response()
        await generate.send(services, req, resp, texts())
        stream: Any = resp.stream
        told = [await anext(stream)]
        failing.set()
        told += [event async for event in stream if event != COMMENT]
        await stream.close()
        return told

    opening, last = asyncio.run(act())
    assert opening == COMMENT and json.loads(last.removeprefix(b"data: "))["error"].endswith("not finite")


@pytest.mark.parametrize("path", BODIES)
def test_the_end_of_a_drain_is_the_one_error_of_each_stream(tmp_path: Path, path: str) -> None:
    server = RecordedServer(tmp_path)
    drain = server.services.drain = Drain()
    server.script([[Started(4)], [Text(0, "Hel")], None])
    with server.listening() as url, asking(url, path) as response:
        whole = names(drained(drain, response, b"Hel"))
    last = ["error", *LASTS[path][1:]]
    assert whole[-len(last) :] == last and whole.count("error") == 1
    assert not drain.streams and server.engine.ended == 1


def test_a_response_whose_stream_a_drain_has_ended_is_stored_as_failed(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path)
    drain = server.services.drain = Drain()
    server.script([[Started(4)], [Text(0, "Hel")], None])
    with server.listening() as url:
        with asking(url, "/v1/responses", store=True) as response:
            told = drained(drain, response, b"Hel")
        id_ = json.loads(told.decode().split("data: ")[1].split("\n")[0])["response"]["id"]

        def stored() -> Any:
            found = httpx.get(f"{url}/v1/responses/{id_}", timeout=60)
            return found.json() if found.status_code == 200 else None

        row = wait_until(stored, what="the row of the response")
    assert (row["status"], row["output_text"], row["error"]["type"]) == ("failed", "Hel", "internal_error")
