"""The unmodified SDK of Anthropic, sync and async, over a socket to an engine that tells recorded events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pydantic
import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate
from frontend.engine.events import Called, Ended, Finished, Reasoning, Started, Text
from ipc.errors import InferenceFailed, InputTooLong, QueueFull
from tests.fakes.generation import Step
from tests.fakes.generation_server import CHAT, DENSE, ENDED, SCRIPT, RecordedServer, calling, in_pieces
from tests.harness.later import anthropic
from tests.harness.sdks import Clients, of_anthropic

KEY = api_keys.fresh()
HELLO: Any = {"model": "default", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLING: list[Step] = [
    [Started(9)],
    [Reasoning(0, "I need"), Reasoning(0, " a tool.")],
    [Text(0, "Let me see."), *in_pieces(Called(0, 0, "call-1", "weather", '{"city":"Oslo"}'), 1)],
    [Finished(0, "tool_calls", tokens=7), Ended(9, 7)],
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordedServer, str]]:
    """A server that asks for a key, and its address."""
    gate = Gate((KeyEntry("app", api_keys.hashed(KEY)),))
    server = RecordedServer(tmp_path_factory.mktemp("anthropic"), gate)
    with server.listening() as url:
        yield server, url


@pytest.fixture
def server(running: tuple[RecordedServer, str]) -> RecordedServer:
    """The server, which answers "Hello you" and has been asked nothing."""
    return running[0].anew()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def connected(running: tuple[RecordedServer, str], request: Any) -> Iterator[Clients]:
    """A client that has the key."""
    with of_anthropic(running[1], is_async=request.param, key=KEY) as made:
        yield made


@pytest.fixture
def clients(connected: Clients, server: RecordedServer) -> Clients:
    """A client of the server that has been asked nothing."""
    return connected


def test_a_message_is_created(clients: Clients) -> None:
    message = clients.call(lambda client: client.messages.create(**HELLO))
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", CHAT)
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello you")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (4, 2)


def test_a_stream_of_events_has_their_types_in_order(clients: Clients) -> None:
    events = clients.items(lambda client: client.messages.create(**HELLO, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.input_tokens == 4
    assert "".join(event.delta.text for event in events[2:4]) == "Hello you"
    assert (events[5].delta.stop_reason, events[5].usage.output_tokens) == ("end_turn", 2)


def test_the_helper_of_streams_gathers_thoughts_text_and_calls(
    server: RecordedServer, clients: Clients
) -> None:
    server.script(CALLING)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    events, message = clients.helped(
        lambda client: client.messages.stream(**HELLO, tools=[TOOL], thinking=thinking), "get_final_message"
    )
    assert "".join(event.text for event in events if event.type == "text") == "Let me see."
    assert "".join(event.thinking for event in events if event.type == "thinking") == "I need a tool."
    thought, text, call = message.content
    assert (thought.thinking, thought.signature, text.text) == ("I need a tool.", "", "Let me see.")
    assert (call.type, call.id, call.name, call.input) == ("tool_use", "call-1", "weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (9, 7)
    assert server.engine.calls[0].variables == {"enable_thinking": True}


def test_a_call_that_was_cut_off_has_the_members_that_are_whole(
    server: RecordedServer, clients: Clients
) -> None:
    for arguments, members in (
        ('{"city":"Oslo","days":[1,{"a":"b', {"city": "Oslo", "days": [1, {}]}),
        ('{"ci', {}),
        ("", {}),
    ):
        cut = in_pieces(Called(0, 0, "call-1", "weather", arguments, is_whole=False))
        script: list[Step] = [
            [Started(9), Text(0, "See."), *cut, Finished(0, "length", tokens=7), Ended(9, 7)]
        ]
        server.script(script)
        whole = clients.call(lambda client: client.messages.create(**HELLO, tools=[TOOL]))
        server.script(script)
        _, gathered = clients.helped(
            lambda client: client.messages.stream(**HELLO, tools=[TOOL]), "get_final_message"
        )
        for message in (whole, gathered):
            assert [block.type for block in message.content] == ["text", "tool_use"]
            assert (message.content[1].input, message.stop_reason) == (members, "max_tokens")


def test_blocks_stand_in_the_order_in_which_they_were_written(
    server: RecordedServer, clients: Clients
) -> None:
    calls = [in_pieces(Called(0, at, f"call-{at}", "weather", '{"city":"Oslo"}')) for at in range(2)]
    written = [Text(0, "a"), *calls[0], Reasoning(0, "b"), Text(0, "c"), *calls[1], Text(0, "d")]
    script: list[Step] = [[Started(9), *written, Finished(0, "stop", tokens=7), Ended(9, 7)]]
    server.script(script, script)
    whole = clients.call(lambda client: client.messages.create(**HELLO, tools=[TOOL]))
    server.script(script, script)
    _, gathered = clients.helped(
        lambda client: client.messages.stream(**HELLO, tools=[TOOL]), "get_final_message"
    )
    kinds = ["text", "tool_use", "thinking", "text", "tool_use", "text"]
    for message in (whole, gathered):
        assert [block.type for block in message.content] == kinds


def test_a_tool_is_called_and_its_result_goes_back(server: RecordedServer, clients: Clients) -> None:
    server.script(CALLING, SCRIPT)
    choice = {"type": "tool", "name": "weather"}
    first = clients.call(lambda client: client.messages.create(**HELLO, tools=[TOOL], tool_choice=choice))
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "cold"}]}
    talk = [
        *HELLO["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = clients.call(lambda client: client.messages.create(**(HELLO | {"messages": talk}), tools=[TOOL]))
    assert second.content[0].text == "Hello you"
    asked, told = server.engine.calls
    assert asked.tools is not None and (asked.tools.choice, asked.tools.name) == ("named", "weather")
    assert [message["role"] for message in told.messages or ()] == ["user", "assistant", "tool"]
    result = {"role": "tool", "content": "cold", "tool_call_id": "call-1", "name": "weather"}
    assert (told.messages or [])[2] == result


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_runner_of_tools_makes_three_rounds(
    running: tuple[RecordedServer, str], server: RecordedServer, is_async: bool, streams: bool
) -> None:
    runners: list[Any] = []

    def weather(city: str) -> str:
        if city == "Rome":
            runners[0].add_tools(tool("forecast", forecast))
        return f"cold in {city}"

    def forecast(city: str) -> str:
        return f"warm in {city}"

    def tool(name: str, function: Callable[[str], str]) -> Any:
        async def later(city: str) -> str:
            return function(city)

        if is_async:
            return anthropic.beta_async_tool(later, name=name, description="Weather.")
        return anthropic.beta_tool(function, name=name, description="Weather.")

    def run(client: Any) -> Any:
        tools = [tool("weather", weather)]
        runners.append(client.beta.messages.tool_runner(**HELLO, tools=tools, stream=streams))
        return runners[0].until_done()

    calls = [("call-1", "weather", "Oslo"), ("call-2", "weather", "Rome"), ("call-3", "forecast", "Bonn")]
    server.script(*(calling(*call) for call in calls), SCRIPT)
    with of_anthropic(running[1], is_async=is_async, key=KEY) as clients:
        last = clients.call(run)
    assert last.content[0].text == "Hello you"
    talk = server.engine.calls[3].messages or []
    results = [message["content"] for message in talk if message["role"] == "tool"]
    assert results == ["cold in Oslo", "cold in Rome", "warm in Bonn"]
    offered = [call.tools.functions if call.tools else [] for call in server.engine.calls]
    names = [[function["function"]["name"] for function in functions] for functions in offered]
    assert names == [["weather"], ["weather"], ["weather", "forecast"], ["weather", "forecast"]]


def test_a_stop_text_ends_the_message(server: RecordedServer, clients: Clients) -> None:
    server.script([[Started(4)], [Text(0, "Hel"), Finished(0, "stop", stop="lo"), ENDED]])
    message = clients.call(lambda client: client.messages.create(**HELLO, stop_sequences=["lo"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lo")
    assert server.engine.calls[0].ending.stop == ["lo"]


class City(pydantic.BaseModel):
    """A form of answers."""

    name: str


def test_an_answer_is_parsed_into_a_form(server: RecordedServer, clients: Clients) -> None:
    server.script([[Started(4)], [Text(0, '{"name":"Oslo"}'), Finished(0, "stop"), ENDED]])
    message = clients.call(lambda client: client.messages.parse(**HELLO, output_format=City))
    assert message.parsed_output == City(name="Oslo")
    grammar = server.engine.calls[0].grammar
    assert grammar is not None and grammar.kind == "json_schema" and '"name"' in grammar.value


def test_tokens_are_counted(server: RecordedServer, clients: Clients) -> None:
    asked = {"model": "default", "messages": HELLO["messages"], "tools": [TOOL], "system": "be kind"}
    count = clients.call(lambda client: client.messages.count_tokens(**asked))
    assert count.input_tokens == 4
    [call] = server.engine.calls
    assert call.counts_only and call.tools is not None


def test_models_are_listed_on_pages_and_asked_for(clients: Clients) -> None:
    models = clients.items(lambda client: client.models.list())
    assert [model.id for model in models] == ["default", CHAT, DENSE]
    assert models == clients.items(lambda client: client.models.list(limit=1))
    assert all(model.type == "model" and isinstance(model.created_at, datetime) for model in models)
    before = clients.items(lambda client: client.models.list(limit=1, before_id=DENSE))
    assert [model.id for model in before] == [CHAT, "default"]
    model = clients.call(lambda client: client.models.retrieve(CHAT))
    assert (model.id, model.display_name) == (CHAT, CHAT)
    with pytest.raises(anthropic.NotFoundError):
        clients.call(lambda client: client.models.retrieve("none"))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "claude"}, "NotFoundError", "'claude' does not exist"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens: 0 given"),
        ({"messages": []}, "BadRequestError", "messages: may not be empty"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError", "tool_choice"),
    ],
)
def test_refusals_are_typed(clients: Clients, fields: Any, kind: str, message: str) -> None:
    with pytest.raises(getattr(anthropic, kind), match=message) as caught:
        clients.call(lambda client: client.messages.create(**(HELLO | fields)))
    assert caught.value.body["type"] == "error"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputTooLong("the prompt has 70 tokens, the limit is 64"), "BadRequestError"),
        (QueueFull("no room", retry_after_s=1), "APIStatusError"),
        (InferenceFailed("not finite"), "InternalServerError"),
    ],
)
def test_failures_are_typed_also_before_a_stream(
    server: RecordedServer, clients: Clients, error: Any, kind: str
) -> None:
    server.script(error)
    with pytest.raises(getattr(anthropic, kind), match=error.message) as caught:
        clients.call(lambda client: client.messages.create(**HELLO))
    assert caught.value.status_code == (400 if isinstance(error, InputTooLong) else error.status)
    with pytest.raises(getattr(anthropic, kind), match=error.message):
        clients.items(lambda client: client.messages.create(**HELLO, stream=True))


def test_an_error_inside_a_stream_raises(server: RecordedServer, clients: Clients) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], InferenceFailed("not finite")])
    with pytest.raises(anthropic.APIStatusError, match="not finite") as caught:
        clients.items(lambda client: client.messages.create(**HELLO, stream=True))
    assert "'type': 'api_error'" in str(caught.value.body)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wrong_key_is_refused(running: tuple[RecordedServer, str], is_async: bool) -> None:
    with (
        of_anthropic(running[1], is_async=is_async, key="wrong") as wrong,
        pytest.raises(anthropic.AuthenticationError),
    ):
        wrong.call(lambda client: client.messages.create(**HELLO))


def test_the_raw_response_has_the_id_of_the_request(clients: Clients) -> None:
    raw = clients.call(
        lambda client: client.messages.with_raw_response.create(
            **HELLO, extra_headers={"x-request-id": "mine"}
        )
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["content-type"] == "application/json"


def test_a_silent_stream_pings(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path, generation__keep_alive_s="0.02")
    server.script([[Started(4)], None])
    with (
        server.listening() as url,
        anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client,
        client.messages.with_streaming_response.create(**HELLO, stream=True) as response,
    ):
        lines = response.iter_lines()
        told = [next(lines) for _ in range(10)]
    assert told[0] == "event: message_start"
    ping = [": keep-alive", "", "event: ping", 'data: {"type":"ping"}', ""]
    assert told[3:] == (ping * 2)[: len(told) - 3]
    assert server.engine.ended == 1, "the work ends when its client goes away"
