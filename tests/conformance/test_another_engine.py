"""A frontend over another engine: generated text, and the clear refusals of what only workers of this host can do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.far_end import MODEL, SLOW
from tests.fakes.gateway import gateway
from tests.harness.server import Server, make_server


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A frontend whose engine is a process with a model that says a recorded text."""
    place = tmp_path_factory.mktemp("far-text")
    nothing = make_server(place, ())
    nothing.environment |= {"PENSTOCK_CATALOG__DIRS": "", "PENSTOCK_SHARED_MEMORY__ENABLED": "true"}
    with gateway(place, nothing, MODEL) as server:
        yield server


def ask(server: Server, *, stream: bool) -> bytes:
    """The body of the answer to one message."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.body


def test_text_is_streamed_and_its_first_token_is_timed(far: Server) -> None:
    before = far.metric("penstock_time_to_first_token_seconds_count")
    lines = [line[6:] for line in ask(far, stream=True).decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "far away"
    assert choices[-1]["finish_reason"] == "stop"
    assert far.metric("penstock_time_to_first_token_seconds_count") == before + 1


def test_text_comes_whole(far: Server) -> None:
    answer = json.loads(ask(far, stream=False))
    assert answer["choices"][0]["message"]["content"] == "far away"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (f"/v1/admin/load/{MODEL}", 501, "models run elsewhere"),
        (f"/v1/admin/unload/{MODEL}", 501, "models run elsewhere"),
        (f"/v2/repository/models/{MODEL}/load", 501, "models run elsewhere"),
        (f"/v2/repository/models/{MODEL}/unload", 501, "models run elsewhere"),
        ("/v1/config/reload", 501, "models run elsewhere"),
        ("/v2/systemsharedmemory/region/r/register", 400, "models run on other hosts"),
    ],
)
def test_what_only_workers_of_this_host_can_do_is_refused(
    far: Server, path: str, status: int, words: str
) -> None:
    answer = far.post(path, {"key": "/k", "offset": 0, "byte_size": 64} if "region" in path else {})
    assert answer.status == status and words in answer.body.decode(), answer.body


TALK = {"model": SLOW, "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [(f"/v1/encode/{SLOW}", {"items": [{"text": "hello"}]}), ("/v1/chat/completions", TALK)],
)
def test_a_request_ends_soon_after_its_deadline_although_the_far_end_says_nothing(
    far: Server, path: str, body: dict[str, Any]
) -> None:
    began = time.monotonic()
    answer = far.post(path, body, x_request_timeout="0.5")
    assert answer.status == 504 and "the deadline passed" in answer.body.decode(), answer.body
    assert 0.5 <= time.monotonic() - began < 30
