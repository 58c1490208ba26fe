"""A worker is killed at a chosen stage of a text: before the first token, in a call, in held-back text, at the end.

Each kill follows an event that the client has seen. The text is that of the same request without a death.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import orjson
import pytest

from tests.harness.chat import MODEL, ChatStream, chat_catalogs, prompts_of
from tests.harness.server import Server, serving, stopped, wait_until

TOKENS = 160
SEEDED = {"temperature": 1.0, "seed": 21, "top_p": 0.95}
HELD = 60
"""Characters of a stop text that match, and then do not."""
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 400}},
            "required": ["text"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers; every life of a worker counts as a healthy one."""
    root = tmp_path_factory.mktemp("stages")
    settings = {
        "worker.count": 2,
        "worker.healthy_after_s": 0.5,
        "catalog.dirs": chat_catalogs(root, context=5000),
        "limits.restart_wait_s": 120,
        "limits.load_wait_s": 120,
    }
    with serving(root, models=(MODEL, "fake/echo", "fake/slow"), settings=settings) as running:
        wait_until(lambda: running.starts(0) and running.starts(1) and both_up(running), 120, "two workers")
        yield running


@pytest.fixture
def prompt() -> str:
    """A prompt that goes to the worker in slot 0."""
    return prompts_of(0, 1)[0]


def both_up(server: Server) -> bool:
    return server.metric("penstock_worker_up") == 2


def carried(server: Server) -> float:
    """Texts that went on at another worker."""
    return server.metric("penstock_continuations_total", outcome="carried")


def kill(server: Server) -> int:
    """Kill the worker in slot 0; how many of its lives had become ready."""
    starts = server.starts(0)
    os.kill(wait_until(lambda: server.worker_pid(0)), signal.SIGKILL)
    return starts


def returned(server: Server, starts: int) -> None:
    wait_until(lambda: server.starts(0) > starts, 240, "the worker's return")
    wait_until(lambda: both_up(server), 240, "two workers")


def said(server: Server, prompt: str, **fields: Any) -> str:
    """The text without a death."""
    with ChatStream(server.port, prompt, TOKENS, timeout_s=240, **fields) as stream:
        assert stream.rest().is_whole
        return stream.text


@pytest.mark.long
def test_before_the_first_token(server: Server, prompt: str) -> None:
    expected = said(server, prompt, **SEEDED)
    with ThreadPoolExecutor(1) as pool, stopped(server.worker_pid(0)):
        asked = pool.submit(said, server, prompt, **SEEDED)
        # NOTE: the worker stands still, so no token can have come.
        wait_until(lambda: server.metric("penstock_requests_in_flight", model=MODEL) == 1, what="the request")
        starts = kill(server)
        assert asked.result() == expected
    returned(server, starts)


@pytest.mark.long
def test_within_held_back_text(server: Server, prompt: str) -> None:
    expected = said(server, prompt, **SEEDED)
    begins = len(expected) // 3
    fields = SEEDED | {"stop": [f"{expected[begins : begins + HELD]}#never#"]}
    assert said(server, prompt, **fields) == expected
    hits = 0
    while not hits:
        before = carried(server)
        with ChatStream(server.port, prompt, TOKENS, timeout_s=240, **fields) as stream:
            while len(stream.text) < begins:
                stream.more()
            starts, seen = kill(server), len(stream.text)
            assert stream.rest().is_whole and stream.text == expected
        # NOTE: a stop text may begin with a character that stands elsewhere, too.
        hits += carried(server) > before and seen < begins + HELD
        returned(server, starts)


@pytest.mark.long
def test_at_the_last_token(server: Server, prompt: str) -> None:
    expected = said(server, prompt, **SEEDED)
    with ChatStream(server.port, prompt, TOKENS, timeout_s=240, **SEEDED) as stream:
        stream.rest()
        pieces = stream.chunks
    for left in (1, 0):
        with ChatStream(server.port, prompt, TOKENS, timeout_s=240, **SEEDED) as stream:
            while len(stream.text) < len(expected) and stream.chunks < pieces - left:
                stream.more()
            starts = kill(server)
            ending = stream.rest()
            assert ending.is_whole and stream.text == expected
            assert ending.usage is None or ending.usage["completion_tokens"] == TOKENS
        returned(server, starts)


def test_within_a_call(server: Server, prompt: str) -> None:
    def called(kills_at: int = 0) -> tuple[list[tuple[str, str]], str, int]:
        """Calls by name and arguments, the reason of the end, and the lives of the worker before its death."""
        calls: list[list[str]] = []
        reason, starts, pieces = "", 0, 0
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 300,
            "stream": True,
            "tools": [TOOL],
            "tool_choice": "required",
            **SEEDED,
        }
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=240) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                [choice] = orjson.loads(line[6:])["choices"]
                reason = choice["finish_reason"] or reason
                for part in choice["delta"].get("tool_calls") or ():
                    function = part["function"]
                    if function.get("name"):
                        calls.append([function["name"], ""])
                    calls[part["index"]][1] += function.get("arguments") or ""
                    pieces += 1
                    if pieces == kills_at:
                        starts = kill(server)
        assert pieces > 8, "the arguments come in pieces"
        return [(name, arguments) for name, arguments in calls], reason, starts

    expected, reason, _ = called()
    before = carried(server)

    def is_carried() -> bool:
        found, ending, starts = called(kills_at=4)
        assert (found, ending) == (expected, reason) and expected[0][0] == "note"
        returned(server, starts)
        return carried(server) > before

    # NOTE: the client reads behind the worker, so the worker may have written the whole call before its death.
    wait_until(is_carried, what="a death within the call")
    assert carried(server) == before + 1
