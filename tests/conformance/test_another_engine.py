"""A frontend over another engine: generated text, and the clear refusals of what only workers of this host can do."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.fakes.far_end import MODEL
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
    ("path", "words"),
    [
        (f"/v1/admin/load/{MODEL}", "models run elsewhere"),
        (f"/v1/admin/unload/{MODEL}", "models run elsewhere"),
        (f"/v2/repository/models/{MODEL}/load", "models run elsewhere"),
        (f"/v2/repository/models/{MODEL}/unload", "models run elsewhere"),
        ("/v1/config/reload", "models run elsewhere"),
        ("/v2/systemsharedmemory/region/r/register", "models run on other hosts"),
    ],
)
def test_what_only_workers_of_this_host_can_do_is_refused(far: Server, path: str, words: str) -> None:
    answer = far.post(path, {"key": "/k", "offset": 0, "byte_size": 64} if "region" in path else {})
    assert answer.status in (400, 501) and words in answer.body.decode(), answer.body
