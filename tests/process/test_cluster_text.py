"""Generated text through a gateway: the words of the local server, and the deaths of boxes and gateways meanwhile.

Box `a` has a frontend of its own, which is the local server to compare with.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from frontend.engine.streams import homes
from ipc.wire.messages import GenerateCall
from tests.fakes.collector import Collector, collecting
from tests.fakes.held_text import hold_of
from tests.harness.broker import PATIENCE_S, Broker
from tests.harness.chat import MODEL, ChatStream, chat_catalogs
from tests.harness.cluster import Box, box, gateway, living
from tests.harness.server import Answer, Server, wait_until

LONG = 60
"""Tokens of a text in whose middle something happens."""


@pytest.fixture(scope="module")
def catalogs(place: Path) -> str:
    found = chat_catalogs(place)
    entry = place / "chat_catalog" / "chat.yaml"
    entry.write_text(
        entry.read_text().replace("adapter: causal", "adapter: tests.fakes.held_text:HeldAdapter")
    )
    return found


@pytest.fixture(scope="module")
def boxes(place: Path, one_broker: Broker, catalogs: str) -> Iterator[tuple[Box, Box]]:
    settings = {"catalog.dirs": catalogs, "generation.continuations": 2}
    with (
        text_box(place, "a", one_broker, settings) as a,
        text_box(place, "b", one_broker, settings) as b,
    ):
        yield a, b


@contextmanager
def text_box(place: Path, name: str, one: Broker, settings: Mapping[str, Any]) -> Iterator[Box]:
    """A box with the tiny chat model."""
    with box(place / name, name, [one.url], models=(MODEL,), settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Takes the spans of `near`, of requests whose traceparent says so."""
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def near(place: Path, one_broker: Broker, boxes: tuple[Box, Box], collector: Collector) -> Iterator[Server]:
    traced = {"tracing.endpoint": collector.url, "tracing.sample_ratio": 0}
    with gateway(place / "near", [one_broker.url], traced) as server:
        wait_until(lambda: living(server) == {"a", "b"}, what="both boxes")
        wait_until(lambda: chat(server, "hello").status == 200, what="the first text")
        yield server


@pytest.fixture(scope="module")
def local(boxes: tuple[Box, Box]) -> Iterator[Server]:
    """The frontend of box a."""
    server = boxes[0].server
    server.environment["PENSTOCK_SUPERVISE"] = "0"
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        assert server.process is not None
        server.process.terminate()
        server.process.wait(60)


def chat(server: Server, prompt: str, tokens: int = 12, **fields: Any) -> Answer:
    """A whole chat completion."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, **fields}
    return server.post("/v1/chat/completions", body)


def prompt_for(name: str, start: int = 0) -> str:
    """A prompt whose conversation has this box as its home."""

    def home(prompt: str) -> str:
        call = GenerateCall(messages=[{"role": "user", "content": prompt}])
        return homes.home(["a", "b"], MODEL, homes.beginning_of(call))

    return next(
        prompt for prompt in map("question {}".format, range(start, start + 100)) if home(prompt) == name
    )


@contextmanager
def held_text(one: Box) -> Iterator[None]:
    """Texts at a box stop behind their first tokens."""
    hold = hold_of(one.server.run_dir)
    hold.touch()
    try:
        yield
    finally:
        hold.unlink(missing_ok=True)


def told(answer: Answer) -> Any:
    """What a chat completion says, and its tokens."""
    assert answer.status == 200, answer.body
    body = answer.json()
    return [choice["message"] | {"why": choice["finish_reason"]} for choice in body["choices"]], body[
        "usage"
    ]["completion_tokens"]


def carried(server: Server, outcome: str = "carried") -> float:
    """How many texts went on like this."""
    return server.metric("penstock_continuations_total", outcome=outcome)


def test_chat_completions_are_those_of_the_local_server(near: Server, local: Server) -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"seed": 3, "temperature": 1.0, "n": 2, "logprobs": True, "top_logprobs": 2},
    ]
    for fields in wishes:
        answers = [told(chat(server, "tell me", **fields)) for server in (local, near)]
        assert answers[0] == answers[1]
    refused = [chat(server, "x", 0) for server in (local, near)]
    assert refused[0].status == refused[1].status == 422 and refused[0].body == refused[1].body


def test_the_spans_of_a_streamed_text_are_one_trace_with_the_times_of_its_box(
    near: Server, collector: Collector
) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
    with ChatStream(near.port, prompt_for("b"), 12, headers=headers) as stream:
        assert stream.rest().is_whole
    wait_until(lambda: collector.server_span(trace_id), what="the server span")
    spans = {span.name: span for span in collector.of(trace_id)}
    root, prepare = spans.pop("POST /v1/chat/completions"), spans.pop("prepare")
    assert not spans, "a text has steps, and no batches of its own"
    assert (root.parent_id, root.kind, root.status) == (caller, "SPAN_KIND_SERVER", "STATUS_CODE_UNSET")
    assert root.attributes | {"penstock.request_id": ""} == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "penstock.request_id": "",
        "penstock.model": MODEL,
        "penstock.operation": "chat",
    }
    assert (prepare.parent_id, prepare.attributes) == (root.span_id, {"penstock.worker": "b/worker-0"})
    assert root.start_ns <= prepare.start_ns <= prepare.end_ns <= root.end_ns


def test_a_stored_response_is_read_continued_and_deleted_over_the_brokers(near: Server) -> None:
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 4}
    first = near.post("/v1/responses", asked).json()
    path = f"/v1/responses/{first['id']}"
    assert near.get(path).json() == first
    second = near.post("/v1/responses", {**asked, "previous_response_id": first["id"]})
    assert second.status == 200, second.body
    assert near.request("DELETE", path).status == 200
    assert near.get(path).status == 404
    assert not (near.run_dir / "state").exists(), "a gateway has no state of its own"


def test_streams_messages_and_ollama_chats_are_those_of_the_local_server(near: Server, local: Server) -> None:
    texts = []
    for server in (local, near):
        with ChatStream(server.port, "a story", 12) as stream:
            assert stream.rest().is_whole
            texts.append(stream.text)
    assert texts[0] == texts[1]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "a story"}]}
    messages = {**asked, "max_tokens": 12}
    answers = [server.post("/v1/messages", messages).json() for server in (local, near)]
    assert answers[0]["content"] == answers[1]["content"] and answers[0]["usage"] == answers[1]["usage"]
    plain = {**asked, "stream": False, "options": {"num_predict": 12}}
    chats = [server.post("/api/chat", plain).json() for server in (local, near)]
    assert chats[0]["message"] == chats[1]["message"] and chats[0]["message"]["content"]
    inputs = {"model": MODEL, "input": "a story", "max_output_tokens": 16}
    responses = [server.post("/v1/responses", inputs).json() for server in (local, near)]
    assert responses[0]["output"][0]["content"] == responses[1]["output"][0]["content"]


def test_a_box_that_is_killed_in_the_middle_of_a_text_changes_no_word(
    near: Server, boxes: tuple[Box, Box]
) -> None:
    prompt, before = prompt_for("a"), carried(near)
    whole = chat(near, prompt, LONG, ignore_eos=True).json()["choices"][0]["message"]["content"]
    with held_text(boxes[0]), ChatStream(near.port, prompt, LONG) as stream:
        stream.more()
        assert boxes[0].end(signal.SIGKILL) == -signal.SIGKILL
        assert stream.rest().is_whole, stream.ending
    assert stream.text == whole
    assert carried(near) == before + 1
    boxes[0].start_bridge()
    wait_until(lambda: living(near) == {"a", "b"}, what="the next life of box a")


def test_a_box_that_stops_gives_its_texts_to_another_one(near: Server, boxes: tuple[Box, Box]) -> None:
    prompt, before = prompt_for("b"), carried(near, "moved")
    whole = chat(near, prompt, LONG, ignore_eos=True).json()["choices"][0]["message"]["content"]
    with held_text(boxes[1]), ChatStream(near.port, prompt, LONG) as stream:
        stream.more()
        boxes[1].tell(signal.SIGTERM)
        assert stream.rest().is_whole, stream.ending
    assert stream.text == whole
    assert carried(near, "moved") == before + 1
    assert boxes[1].bridge is not None and boxes[1].bridge.wait(PATIENCE_S) == 0
    boxes[1].start_bridge()
    wait_until(lambda: living(near) == {"a", "b"}, what="the next life of box b")


def test_a_client_that_leaves_ends_the_text_at_the_box(near: Server, boxes: tuple[Box, Box]) -> None:
    with held_text(boxes[0]), ChatStream(near.port, prompt_for("a"), LONG) as stream:
        stream.more()
        wait_until(lambda: boxes[0].items == 1, what="the text at its box")
        stream.close()
        wait_until(lambda: boxes[0].items == 0, what="the end of the text at its box")
    assert chat(near, prompt_for("a")).status == 200


@pytest.mark.long
def test_texts_of_a_killed_gateway_end_at_the_box(
    place: Path, one_broker: Broker, boxes: tuple[Box, Box], near: Server
) -> None:
    with gateway(place / "second", [one_broker.url]) as second:
        wait_until(lambda: living(second) == {"a", "b"}, what="both boxes")
        wait_until(lambda: chat(second, "hello").status == 200, what="the models")
        with held_text(boxes[0]), ChatStream(second.port, prompt_for("a"), LONG) as stream:
            stream.more()
            wait_until(lambda: boxes[0].items == 1, what="the text at its box")
            said = len(boxes[0].log)
            second.kill_all_processes()
            wait_until(lambda: boxes[0].items == 0, what="the end of the text at its box")
        assert "gave up 1 item" in boxes[0].log[said:]
        second.start()
        second.wait_ready()
    assert chat(near, prompt_for("a")).status == 200
