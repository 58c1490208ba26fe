"""Web search and pages in runs of chat, Responses and Messages: scripted models, and sites that run here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from falcon.util import async_to_sync

from frontend.agent.web import UrlSearch, Web
from frontend.generation.hosted import SEARCH, Offer
from frontend.state.approvals import Decision
from frontend.web.child import Children
from frontend.web.fetching import Fetcher
from ipc.settings import Fetch
from tests.fakes.agent import OFFER
from tests.fakes.generation import Step
from tests.fakes.web import HERE, Site, answer, serving_site, to
from tests.unit.frontend.agent.test_agent_chat import ASKED, FINAL, AgentServer, calls, events_of

SEARCHING = replace(OFFER, features=OFFER.features | {SEARCH})
FIND, READ = "mistralrs_search_the_web", "mistralrs_website_content_extractor"
FOUND = [
    {"url": "https://example.com/a", "title": "A\0 page", "content": "About  a."},
    {"url": "https://news.example.com/b", "title": "B", "content": "About b."},
    {"url": "https://example.org/c", "title": None, "content": None},
    {"url": "javascript:alert(1)", "title": "no page", "content": ""},
    {"url": "https://example.com/a", "title": "again", "content": ""},
]
HOSTS = ["example.com", "news.example.com", "example.org"]


class SearchServer(AgentServer):
    """Searches at a site of this machine, and reads pages there."""

    def __init__(self, root: Path, site: Site, *scripts: Sequence[Step], offer: Offer = SEARCHING) -> None:
        super().__init__(root, *scripts)
        fetch = Fetch(allowed_networks=(HERE,))
        self._pages, own = Fetcher(fetch), Fetcher(fetch, is_trusted=True)
        self._web = Web(UrlSearch(own, site.url("/search?key=1")), self._pages, Children(), 30)
        self.parts.offer = offer
        self.services.agent = replace(self.parts.parts, web=self._web)

    def close(self) -> None:
        """End the connections."""
        async_to_sync(self._web.close)
        async_to_sync(self._pages.close)

    def ask(self, **fields: Any) -> Any:
        """The response of chat with a search."""
        return self.post("/v1/chat/completions", {"messages": ASKED, "web_search_options": {}, **fields})

    def respond(self, tool: dict[str, Any] | None = None, **fields: Any) -> Any:
        """The response of a request for a response."""
        tools = [{"type": "web_search", **(tool or {})}]
        return self.post("/v1/responses", {"input": "6 times 7?", "tools": tools, **fields})

    def message(self, tool: dict[str, Any] | None = None, **fields: Any) -> Any:
        """The response of a message."""
        tools = [{"type": "web_search_20250305", "name": "web_search", **(tool or {})}]
        return self.post("/v1/messages", {"messages": ASKED, "tools": tools, **fields})

    @property
    def told(self) -> list[Any]:
        """What the model read of its calls in the last round."""
        messages = self.engine.calls[-1].messages or []
        return [orjson.loads(each["content"]) for each in messages if each["role"] == "tool"]

    def described(self, name: str) -> str:
        """The description of a tool that the model saw."""
        tools = self.engine.calls[0].tools
        assert tools is not None
        return next(
            str(each["function"]["description"])
            for each in tools.functions
            if each["function"]["name"] == name
        )


def find(query: str = "rome") -> tuple[str, str]:
    """A search."""
    return FIND, json.dumps({"query": query})


def read(url: str) -> tuple[str, str]:
    """A page."""
    return READ, json.dumps({"url": url})


Make = Callable[..., SearchServer]


@pytest.fixture
def site() -> Iterator[Site]:
    """A search engine, and a page."""
    page = answer(b"Rome has hills.", kind="text/plain; charset=utf-8")
    found = answer(orjson.dumps({"results": FOUND}), kind="application/json")
    with serving_site({"/search": found, "/rome.txt": page}) as running:
        yield running


@pytest.fixture
def make(tmp_path: Path, site: Site) -> Iterator[Make]:
    """Makes servers of these scripts, which are closed in the end."""
    with ExitStack() as stack:

        def made(*scripts: Sequence[Step], **options: Any) -> SearchServer:
            return stack.enter_context(closing(SearchServer(tmp_path, site, *scripts, **options)))

        yield made


def test_a_search_of_chat_gives_the_model_results_and_the_client_a_record(make: Make, site: Site) -> None:
    server = make(calls(find("rome & hills")), FINAL)
    body = server.ask().json
    assert body["choices"][0]["message"]["content"] == "It is 42."
    assert body["agentic_tool_calls"] == [
        {
            "round": 0,
            "name": FIND,
            "arguments": '{"query":"rome & hills"}',
            "result_content": "3 results\nsources: example.com, news.example.com, example.org",
        }
    ]
    assert server.told == [
        {
            "sources": HOSTS,
            "output": [
                {"title": "A page", "url": "https://example.com/a", "description": "About a."},
                {"title": "B", "url": "https://news.example.com/b", "description": "About b."},
                {"title": "", "url": "https://example.org/c", "description": ""},
            ],
        }
    ]
    assert site.paths == ["/search?key=1&q=rome+%26+hills&format=json"]
    assert server.parts.counts.calls == [(FIND, "success")]


def test_a_stream_of_chat_tells_query_and_sources(make: Make, site: Site) -> None:
    server = make(calls(find(), read(site.url("/rome.txt"))), FINAL)
    told = [body for name, body in events_of(server.ask(stream=True).text) if name]
    assert [each["phase"] for each in told] == ["calling", "complete"] * 2
    assert [each["tool_name"] for each in told] == [FIND, FIND, READ, READ]
    assert [each["data"] for each in told] == [
        {"tool_type": "web_search", "query": "rome"},
        {"tool_type": "web_search", "results_count": 3, "sources": HOSTS},
        {"tool_type": "web_search", "url": site.url("/rome.txt")},
        {"tool_type": "web_search", "results_count": 1, "sources": ["127.0.0.1"]},
    ]
    assert server.told[1] == {"sources": ["127.0.0.1"], "output": "Rome has hills."}


def test_the_model_is_offered_the_pair_of_tools_alone(make: Make) -> None:
    server = make(FINAL)
    server.ask()
    tools = server.engine.calls[0].tools
    assert tools is not None and {each["function"]["name"] for each in tools.functions} == {FIND, READ}
    assert set(tools.strict) == {FIND, READ}


def test_descriptions_and_the_place_of_the_user_reach_the_model(make: Make) -> None:
    place = {
        "type": "approximate",
        "approximate": {"city": "Rome", "country": "IT", "timezone": "Europe/Rome"},
    }
    server = make(FINAL)
    server.ask(
        web_search_options={
            "user_location": place,
            "search_description": "Find.",
            "extract_description": "Read.",
        }
    )
    assert server.described(FIND) == "Find. The user is in: Rome, IT, Europe/Rome."
    assert server.described(READ) == "Read."


def test_a_search_without_results_says_so(make: Make, site: Site) -> None:
    site.pages["/search"] = answer(b'{"results": []}')
    server = make(calls(find()), FINAL)
    [record] = server.ask().json["agentic_tool_calls"]
    assert record["result_content"] == "0 results" and server.told == [{"sources": [], "output": []}]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (answer(status=500), "status 500"),
        (answer(b"<html>"), "something else than results"),
        (answer(b'{"results": 3}'), "something else than results"),
        (answer(b'{"results": [{"url": 3}]}'), "something else than results"),
        (answer(b'{"results": [{"url": "\xff"}]}'), "something else than results"),
        (answer(b"[" * 100_000), "something else than results"),
        (answer(b" " * (3 << 20)), "the limit is 2097152"),
    ],
)
def test_a_search_that_fails_is_told_to_the_model(page: bytes, text: str, make: Make, site: Site) -> None:
    site.pages["/search"] = page
    server = make(calls(find()), FINAL)
    body = server.ask().json
    assert body["choices"][0]["message"]["content"] == "It is 42."
    [told] = server.told
    assert told["status"] == "error" and text in told["exception"]
    assert server.parts.counts.calls == [(FIND, "error")]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((FIND, "{}"), "query"),
        ((FIND, '{"query":""}'), "query"),
        ((FIND, '{"query":"a","n":1}'), "unknown field n"),
        ((FIND, json.dumps({"query": "x" * 1025})), "query"),
        ((FIND, "rome"), "no JSON"),
        ((READ, '{"url":3}'), "url"),
        (read("ftp://example.com/"), "scheme http or https"),
        (read("http://127.0.0.2/"), "not on the internet"),
        (read("http://169.254.169.254/latest/meta-data"), "not on the internet"),
        (read("http://a:b@example.com/"), "user name or a password"),
    ],
)
def test_calls_that_make_no_sense_are_told_to_the_model(call: tuple[str, str], text: str, make: Make) -> None:
    server = make(calls(call), FINAL)
    server.ask()
    [told] = server.told
    assert told["status"] == "error" and text in told["exception"]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (answer(b"caf\xe9", kind="text/plain; charset=latin-1"), "café"),
        (answer("café".encode(), kind="text/plain; charset=nonsense"), "café"),
        (answer(b"caf-dma", kind="text/plain; charset=PunyCode"), "caf-dma"),
        (answer(b'{"a": 1}', kind="application/json"), '{"a": 1}'),
        (answer(b"<a/>", kind="application/atom+xml"), "<a/>"),
        (answer(b"a\0b", kind="text/csv"), "ab"),
    ],
)
def test_texts_that_are_no_html_are_read_as_they_are(
    page: bytes, expected: str, make: Make, site: Site
) -> None:
    site.pages["/page"] = page
    server = make(calls(read(site.url("/page"))), FINAL)
    server.ask()
    assert server.told == [{"sources": ["127.0.0.1"], "output": expected}]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (answer(b"\x89PNG", kind="image/png"), "no text, but 'image/png'"),
        (answer(b"", kind="text/plain"), "the page has no text"),
        (answer(status=404), "status 404"),
        (to("http://10.0.0.1/"), "not on the internet"),
    ],
)
def test_pages_without_text_are_told_to_the_model(page: bytes, text: str, make: Make, site: Site) -> None:
    site.pages["/page"] = page
    server = make(calls(read(site.url("/page"))), FINAL)
    server.ask()
    assert text in server.told[0]["exception"]


@pytest.mark.parametrize(
    ("options", "chars"),
    [
        ({}, 16_000),
        ({"search_context_size": "low"}, 8_000),
        ({"search_context_size": "high"}, 32_000),
        ({"return_token_budget": "unlimited"}, 256_000),
        ({"return_token_budget": "default", "search_context_size": "low"}, 8_000),
    ],
)
def test_the_context_size_bounds_what_the_model_reads(
    options: dict[str, Any], chars: int, make: Make, site: Site
) -> None:
    site.pages["/long"] = answer(b"x" * 2_000_000, kind="text/plain")
    site.pages["/search"] = answer(
        orjson.dumps(
            {"results": [{"url": f"https://a.example/{k}", "content": "y" * 9999} for k in range(50)]}
        )
    )
    server = make(calls(read(site.url("/long")), find()), FINAL)
    server.ask(web_search_options=options)
    page, found = server.told
    assert len(page["output"]) == chars
    lengths = [len(each["description"]) for each in found["output"]]
    assert len(lengths) == 10 and sum(lengths) <= chars and lengths[0] == 2000


def test_domains_hold_for_results_pages_and_redirects(make: Make, site: Site) -> None:
    site.pages["/away"] = to("http://example.net/")
    filters = {"allowed_domains": ["example.com", "EXAMPLE.ORG."], "blocked_domains": ["news.example.com"]}
    server = make(calls(find(), read(site.url("/rome.txt")), read("https://news.example.com/b")), FINAL)
    server.ask(web_search_options={"filters": filters})
    found, *pages = server.told
    assert found["sources"] == ["example.com", "example.org"]
    assert all("outside of the domains" in page["exception"] for page in pages)
    assert "/rome.txt" not in site.paths


def test_one_allowed_domain_is_told_to_the_engine(make: Make, site: Site) -> None:
    make(calls(find()), FINAL).respond({"filters": {"allowed_domains": ["example.com"]}})
    assert site.paths == ["/search?key=1&q=rome+site:example.com&format=json"]


def test_a_search_that_is_denied_keeps_its_type(make: Make, site: Site) -> None:
    server = make(calls(find()), FINAL)
    told = [body for name, body in events_of(server.ask(stream=True, agent_permission="deny").text) if name]
    text = '{"status":"denied","exception":"Web search was denied by policy."}'
    assert told[1]["data"] == {"tool_type": "web_search", "content": text} and site.heads == []


def test_an_approval_names_the_tool(make: Make, site: Site) -> None:
    server = make(calls(read(site.url("/rome.txt"))), FINAL)
    server.parts.approvals.decisions.append(Decision(True))
    events = dict(events_of(server.ask(stream=True, agent_permission="ask").text))
    asked = events["agentic_tool_approval_required"]
    assert asked["tool"] == {"source": "built_in", "kind": "web_search", "label": "Web page extraction"}
    assert asked["arguments"] == {"url": site.url("/rome.txt")}


@pytest.mark.parametrize("include", [None, ["web_search_call.action.sources"]])
def test_a_response_has_items_of_searches(include: list[str] | None, make: Make, site: Site) -> None:
    server = make(calls(find(), read(site.url("/rome.txt"))), FINAL)
    body = server.respond(include=include).json
    search, page, message = body["output"]
    assert (search["type"], search["status"], page["status"]) == ("web_search_call", "completed", "completed")
    assert search["id"].startswith("ws_") and message["content"][0]["text"] == "It is 42."
    expected: dict[str, Any] = {"type": "search", "query": "rome"}
    opened: dict[str, Any] = {"type": "open_page", "url": site.url("/rome.txt")}
    if include:
        urls = [each["url"] for each in FOUND[:3]]
        expected["sources"] = [{"type": "url", "url": url} for url in urls]
        opened["sources"] = [{"type": "url", "url": site.url("/rome.txt")}]
    assert search["action"] == expected and page["action"] == opened


def test_a_stream_of_a_response_tells_the_states_of_a_search(make: Make) -> None:
    server = make(calls(find()), FINAL)
    events = events_of(server.respond(stream=True).text)
    names = [name for name, _ in events]
    begin = names.index("response.output_item.added")
    assert names[begin - 1 : begin + 6] == [
        "agentic_tool_call_progress",
        "response.output_item.added",
        "response.web_search_call.in_progress",
        "response.web_search_call.searching",
        "agentic_tool_call_progress",
        "response.web_search_call.completed",
        "response.output_item.done",
    ]
    added, done = events[begin][1]["item"], events[begin + 5][1]["item"]
    assert added["status"] == "in_progress" and done["status"] == "completed" and added["id"] == done["id"]
    assert all(body["item_id"] == done["id"] for name, body in events if "web_search_call" in name)
    assert events[-1][1]["response"]["output"][0] == done


def test_a_search_that_failed_is_a_failed_item(make: Make, site: Site) -> None:
    site.pages["/search"] = answer(status=500)
    body = make(calls(find()), FINAL).respond().json
    assert body["output"][0]["status"] == "failed" and body["status"] == "completed"


def test_items_of_searches_are_turns_of_a_later_request(make: Make, site: Site) -> None:
    server = make(calls(find(), read(site.url("/rome.txt"))), FINAL)
    first = server.respond(include=["web_search_call.action.sources"]).json
    server.script(FINAL)
    assert server.respond(previous_response_id=first["id"], input="And?").status_code == 200
    by_id = server.engine.calls[-1].messages or []
    assert server.respond(input=[*first["output"], {"role": "user", "content": "And?"}]).status_code == 200
    by_items = server.engine.calls[-1].messages or []
    called = [call["function"] for each in by_id for call in each.get("tool_calls", ())]
    assert called == [
        {"name": FIND, "arguments": {"query": "rome"}},
        {"name": READ, "arguments": {"url": site.url("/rome.txt")}},
    ]
    results = [orjson.loads(each["content"]) for each in by_id if each["role"] == "tool"]
    assert results[0] == {"sources": [each["url"] for each in FOUND[:3]]}
    assert by_id[1:] == by_items


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (None, "input[0].action.type: expected one of search, open_page"),
        ({"type": "find_in_page"}, "input[0].action.type: expected one of search, open_page"),
        ({"type": [["search"]]}, "input[0].action.type: expected one of search, open_page"),
        ({"type": {}}, "input[0].action.type: expected one of search, open_page"),
        ({"type": "search"}, "input[0].action.query: expected a string"),
        ({"type": "open_page", "url": 3}, "input[0].action.url: expected a string"),
    ],
)
def test_items_that_are_no_search_name_their_field(action: Any, text: str, make: Make) -> None:
    item = {"type": "web_search_call", "id": "ws_1", "action": action, "status": "completed"}
    refused = make(FINAL).respond(input=[item, {"role": "user", "content": "And?"}])
    assert refused.status_code == 422 and text in refused.json["message"]


def test_a_message_has_blocks_of_searches_before_its_text(make: Make) -> None:
    server = make(calls(find()), FINAL)
    body = server.message().json
    use, result, text = body["content"]
    assert use["type"] == "server_tool_use" and use["id"].startswith("srvtoolu_")
    assert (use["name"], use["input"]) == ("web_search", {"query": "rome"})
    assert (result["type"], result["tool_use_id"]) == ("web_search_tool_result", use["id"])
    assert result["content"][0] == {
        "type": "web_search_result",
        "url": "https://example.com/a",
        "title": "A page",
        "encrypted_content": "",
        "page_age": None,
    }
    assert text == {"type": "text", "text": "It is 42."} and body["stop_reason"] == "end_turn"
    assert body["usage"] == {
        "input_tokens": 40,
        "output_tokens": 9,
        "server_tool_use": {"web_search_requests": 1},
    }
    again = [*ASKED, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": "And?"}]
    server.script(FINAL)
    assert server.message(messages=again).status_code == 200


def test_a_stream_of_a_message_tells_the_same_blocks(make: Make, site: Site) -> None:
    server = make(calls(find(), read(site.url("/rome.txt"))), FINAL)
    pieces = [piece.split("\n") for piece in server.message(stream=True).text.split("\n\n") if piece]
    events = [(name.removeprefix("event: "), orjson.loads(line[6:])) for name, line in pieces]
    starts = [body for name, body in events if name == "content_block_start"]
    assert [each["index"] for each in starts] == [0, 1, 2]
    use, result, text = (each["content_block"] for each in starts)
    assert (use["type"], use["input"]) == ("server_tool_use", {}) and text["type"] == "text"
    assert len(result["content"]) == 3 and result["tool_use_id"] == use["id"]
    deltas = [body["delta"] for name, body in events if name == "content_block_delta" and body["index"] == 0]
    assert deltas == [{"type": "input_json_delta", "partial_json": '{"query":"rome"}'}]
    assert [name for name, _ in events].count("agentic_tool_call_progress") == 4
    [usage] = [body["usage"] for name, body in events if name == "message_delta"]
    assert usage["server_tool_use"] == {"web_search_requests": 1}


def test_max_uses_counts_the_searches_of_a_run(make: Make, site: Site) -> None:
    server = make(calls(find("a"), find("b")), calls(find("c"), read(site.url("/rome.txt"))), FINAL)
    body = server.message({"max_uses": 2}).json
    assert [path[-13:] for path in site.paths] == ["a&format=json", "b&format=json", "/rome.txt"[-13:]]
    blocks = [each["content"] for each in body["content"] if each["type"] == "web_search_tool_result"]
    assert [isinstance(each, list) for each in blocks] == [True, True, False]
    assert blocks[2] == {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}


def test_domains_of_a_message_stand_in_the_tool(make: Make) -> None:
    server = make(calls(find()), FINAL)
    server.message({"blocked_domains": ["example.com"]})
    assert server.told[0]["sources"] == ["example.org"]


def test_a_search_that_failed_is_an_error_of_its_block(make: Make, site: Site) -> None:
    site.pages["/search"] = answer(status=500)
    [_, result, _] = make(calls(find()), FINAL).message().json["content"]
    assert result["content"] == {"type": "web_search_tool_result_error", "error_code": "unavailable"}


def test_a_later_version_of_anthropic_runs_code_as_well(make: Make) -> None:
    server = make(FINAL)
    server.post(
        "/v1/messages",
        {"messages": ASKED, "tools": [{"type": "web_search_20260209", "name": "web_search"}]},
    )
    tools = server.engine.calls[0].tools
    assert tools is not None
    assert {FIND, READ, "mistralrs_execute_python"} < {each["function"]["name"] for each in tools.functions}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": ASKED, "web_search_options": {}}, "web_search_options"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
        ("/v1/messages", {"messages": ASKED, "web_search_options": {}}, "web_search_options"),
        (
            "/v1/messages",
            {"messages": ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type",
        ),
    ],
)
def test_a_server_without_search_names_the_flag(
    path: str, body: dict[str, Any], field: str, make: Make
) -> None:
    refused = make(FINAL, offer=OFFER).post(path, body)
    assert refused.status_code == (400 if path == "/v1/messages" else 422)
    text = refused.json["error"]["message"]
    assert text.startswith(f"{field}: ") and "--enable-search" in text


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ([{"type": "web_search"}, {"type": "web_search"}], "tools[1].type: web search is asked for twice"),
        ([{"type": "web_search_preview", "filters": {}}], "tools[0].filters: is not offered by the preview"),
        (
            [{"type": "web_search_preview_2025_03_11", "return_token_budget": "default"}],
            "tools[0].return_token_budget: is not offered by the preview",
        ),
        ([{"type": "web_search_soon"}], "tools[0].type: 'web_search_soon' is no known kind"),
        ([{"type": "web_search", "filters": 3}], "tools[0].filters: expected an object"),
    ],
)
def test_tools_of_responses_that_are_refused(tools: list[Any], text: str, make: Make) -> None:
    refused = make(FINAL).post("/v1/responses", {"input": "a", "tools": tools})
    assert refused.status_code == 422 and text in refused.json["message"]


@pytest.mark.parametrize("tool", [{"external_web_access": False}, {"type": "web_search_2025_08_26"}])
def test_versions_of_the_tool_and_a_search_without_access(tool: dict[str, Any], make: Make) -> None:
    server = make(FINAL)
    assert server.respond(tool).status_code == 200
    assert (server.engine.calls[0].tools is None) is ("external_web_access" in tool)


def test_responses_ignore_the_field_of_chat(make: Make) -> None:
    server = make(FINAL)
    assert server.post("/v1/responses", {"input": "a", "web_search_options": 3}).status_code == 200
    assert server.engine.calls[0].tools is None
