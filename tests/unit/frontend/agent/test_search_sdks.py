"""Web search through the unmodified SDKs of OpenAI and Anthropic, sync and async, over a socket to scripted models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.web import Site
from tests.harness import sdks
from tests.harness.later import anthropic, openai
from tests.harness.sdks import Clients
from tests.unit.frontend.agent.test_agent_chat import ASKED, FINAL, calls
from tests.unit.frontend.agent.test_agent_search import FOUND, Make, SearchServer, find, make, site

__all__ = ["make", "site"]
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture
def served(make: Make, site: Site) -> Iterator[tuple[SearchServer, str]]:
    """A model that searches, then answers, and its address."""
    server = make(calls(find()), FINAL)
    with server.listening() as url:
        yield server, url


def of_openai(url: str, is_async: bool) -> Any:
    """A client of OpenAI."""
    kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
    return sdks.clients(kind, is_async=is_async, base_url=f"{url}/v1", api_key="unused", max_retries=0)


def of_anthropic(url: str, is_async: bool) -> Any:
    """A client of Anthropic."""
    kind: Any = anthropic.AsyncAnthropic if is_async else anthropic.Anthropic
    return sdks.clients(kind, is_async=is_async, base_url=url, api_key="unused", max_retries=0)


@BOTH
def test_a_response_with_web_search(served: tuple[SearchServer, str], is_async: bool) -> None:
    asked: dict[str, Any] = {
        "model": "default",
        "input": "6 times 7?",
        "tools": [{"type": "web_search", "filters": {"blocked_domains": ["example.org"]}}],
        "include": ["web_search_call.action.sources"],
    }
    clients: Clients
    with of_openai(served[1], is_async) as clients:
        body = clients.call(lambda client: client.responses.create(**asked))
        search, message = body.output
        assert (search.type, search.status, search.action.query) == ("web_search_call", "completed", "rome")
        assert [each.url for each in search.action.sources] == [each["url"] for each in FOUND[:2]]
        assert body.output_text == "It is 42." and message.type == "message"
        served[0].script(calls(find()), FINAL)
        events = clients.items(lambda client: client.responses.create(**asked, stream=True))
    states = [event.type for event in events if event.type.startswith("response.web_search_call.")]
    assert states == [
        f"response.web_search_call.{state}" for state in ("in_progress", "searching", "completed")
    ]
    assert events[-1].response.output[0].action.query == "rome"


@BOTH
def test_a_completion_with_web_search_options(served: tuple[SearchServer, str], is_async: bool) -> None:
    clients: Clients
    with of_openai(served[1], is_async) as clients:
        body = clients.call(
            lambda client: client.chat.completions.create(
                model="default", messages=ASKED, web_search_options={"search_context_size": "low"}
            )
        )
    assert body.choices[0].message.content == "It is 42."
    assert body.model_extra["agentic_tool_calls"][0]["arguments"] == '{"query":"rome"}'


@BOTH
def test_a_message_with_web_search(served: tuple[SearchServer, str], is_async: bool) -> None:
    asked: dict[str, Any] = {"model": "default", "max_tokens": 64, "messages": ASKED, "tools": [WEB]}
    clients: Clients
    with of_anthropic(served[1], is_async) as clients:
        whole = clients.call(lambda client: client.messages.create(**asked))
        served[0].script(calls(find()), FINAL)
        _, streamed = clients.helped(lambda client: client.messages.stream(**asked), "get_final_message")
    for message in (whole, streamed):
        use, result, text = message.content
        assert (use.type, use.name, use.input) == ("server_tool_use", "web_search", {"query": "rome"})
        assert result.tool_use_id == use.id and result.content[0].title == "A page"
        assert text.text == "It is 42." and message.usage.server_tool_use.web_search_requests == 1
