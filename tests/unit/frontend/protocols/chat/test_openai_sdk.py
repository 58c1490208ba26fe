"""The unmodified SDK of OpenAI, sync and async, over a socket to an engine that tells recorded events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text
from ipc.errors import InferenceFailed, InputTooLong, QueueFull
from ipc.wire.streams import TokenLogprob
from tests.fakes.generation import Step
from tests.fakes.generation_server import CHAT, DENSE, ENDED, SCRIPT, RecordedServer, in_pieces
from tests.harness.later import openai
from tests.harness.sdks import Clients, of_openai

HELLO: Any = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALLING: list[Step] = [
    [Started(9)],
    [
        Reasoning(0, "hm"),
        Text(0, "Let me see."),
        *in_pieces(Called(0, 0, "call-1", "weather", '{"city":"Oslo"}')),
    ],
    [*in_pieces(Called(0, 1, "call-2", "weather", '{"city":"Rome"}'), 1)],
    [Finished(0, "tool_calls", tokens=7), Ended(9, 7)],
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordedServer, str]]:
    """A server and its address."""
    server = RecordedServer(tmp_path_factory.mktemp("openai"))
    with server.listening() as url:
        yield server, url


@pytest.fixture
def server(running: tuple[RecordedServer, str]) -> RecordedServer:
    """The server, which answers "Hello you" and has been asked nothing."""
    return running[0].anew()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def connected(running: tuple[RecordedServer, str], request: Any) -> Iterator[Clients]:
    """A client."""
    with of_openai(running[1], is_async=request.param) as made:
        yield made


@pytest.fixture
def clients(connected: Clients, server: RecordedServer) -> Clients:
    """A client of the server that has been asked nothing."""
    return connected


def _said(text: str, **finished: Any) -> list[Step]:
    return [[Started(4)], [Text(0, text), Finished(0, "stop", **finished), ENDED]]


def test_models_are_listed_and_asked_for(clients: Clients) -> None:
    models = clients.items(lambda client: client.models.list())
    assert [model.id for model in models] == ["default", CHAT, DENSE]
    assert {(model.object, model.owned_by) for model in models} == {("model", "local")}
    assert all(model.created > 0 for model in models)
    assert clients.call(lambda client: client.models.retrieve(DENSE)).id == DENSE
    with pytest.raises(openai.NotFoundError):
        clients.call(lambda client: client.models.retrieve("none"))


def test_a_completion_of_a_conversation(clients: Clients) -> None:
    answer = clients.call(lambda client: client.chat.completions.create(**HELLO))
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", CHAT, "local")
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.index) == ("Hello you", "stop", 0)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 2, 6)


def test_a_stream_of_chunks(clients: Clients) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = clients.items(lambda client: client.chat.completions.create(**HELLO, **options))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hello you"
    assert all(chunk.object == "chat.completion.chunk" and len(chunk.choices) == 1 for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert (last.choices, last.usage.total_tokens) == ([], 6)


def test_the_helper_of_streams_gathers_text_and_calls(server: RecordedServer, clients: Clients) -> None:
    server.script(CALLING)
    events, answer = clients.helped(
        lambda client: client.chat.completions.stream(**HELLO, tools=[TOOL]), "get_final_completion"
    )
    assert "".join(event.delta for event in events if event.type == "content.delta") == "Let me see."
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    called = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert called == [
        ("call-1", "weather", '{"city":"Oslo"}'),
        ("call-2", "weather", '{"city":"Rome"}'),
    ]


def test_log_probabilities_have_texts_and_bytes(server: RecordedServer, clients: Clients) -> None:
    top = [(7, "é".encode(), -0.5), (8, b"\xff", -1.5)]
    text = Text(0, "é", logprobs=[TokenLogprob(7, "é".encode(), -0.5, top)])
    server.script([[Started(4)], [text, Finished(0, "stop"), ENDED]])
    options = {"logprobs": True, "top_logprobs": 2}
    answer = clients.call(lambda client: client.chat.completions.create(**HELLO, **options))
    [entry] = answer.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(each.token, each.bytes) for each in entry.top_logprobs] == [
        ("é", [0xC3, 0xA9]),
        ("\ufffd", [0xFF]),
    ]
    assert server.engine.calls[0].sampling.logprobs == 2


@pytest.mark.parametrize(
    ("choice", "mode", "name", "allowed"),
    [
        ("auto", "auto", "", []),
        ("required", "required", "", []),
        ({"type": "function", "function": {"name": "weather"}}, "named", "weather", []),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
            "required",
            "",
            ["weather"],
        ),
    ],
)
def test_tools_are_called_as_the_choice_says(
    server: RecordedServer, clients: Clients, choice: Any, mode: str, name: str, allowed: list[str]
) -> None:
    server.script(CALLING)
    options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = clients.call(lambda client: client.chat.completions.create(**HELLO, **options))
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    used = server.engine.calls[0].tools
    assert used is not None
    assert (used.choice, used.name, used.allowed, used.parallel) == (mode, name, allowed, False)


def test_a_call_that_was_cut_off_keeps_the_beginning_of_its_arguments(
    server: RecordedServer, clients: Clients
) -> None:
    cut = in_pieces(Called(0, 0, "call-1", "weather", '{"city":"Os', is_whole=False))
    script: list[Step] = [[Started(9), *cut, Finished(0, "length", tokens=7), Ended(9, 7)]]
    server.script(script)
    whole = clients.call(lambda client: client.chat.completions.create(**HELLO, tools=[TOOL])).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("length", None)
    server.script(script)
    chunks = clients.items(lambda client: client.chat.completions.create(**HELLO, tools=[TOOL], stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    server.script(script)
    with pytest.raises(openai.LengthFinishReasonError):
        clients.helped(
            lambda client: client.chat.completions.stream(**HELLO, tools=[TOOL]), "get_final_completion"
        )
    told = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (
        whole.message.tool_calls[0].function.arguments
        == '{"city":"Os'
        == "".join(call.function.arguments for call in told)
    )


def test_the_choice_of_no_tool_gives_the_model_none(server: RecordedServer, clients: Clients) -> None:
    server.script(SCRIPT)
    clients.call(lambda client: client.chat.completions.create(**HELLO, tools=[TOOL], tool_choice="none"))
    assert server.engine.calls[0].tools is None


def test_the_result_of_a_tool_goes_back(server: RecordedServer, clients: Clients) -> None:
    server.script(CALLING, SCRIPT)
    first = clients.call(lambda client: client.chat.completions.create(**HELLO, tools=[TOOL]))
    told = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "cold"}]}
        for call in told.tool_calls
    ]
    talk = [*HELLO["messages"], told.model_dump(exclude_none=True), *results]
    second = clients.call(
        lambda client: client.chat.completions.create(**(HELLO | {"messages": talk}), tools=[TOOL])
    )
    assert second.choices[0].message.content == "Hello you"
    messages = server.engine.calls[1].messages or []
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[1]["reasoning_content"] == "hm"


class City(pydantic.BaseModel):
    """A form of answers."""

    name: str
    people: int


def test_an_answer_is_parsed_into_a_form(server: RecordedServer, clients: Clients) -> None:
    server.script(_said('{"name":"Oslo","people":700000}'))
    answer = clients.call(lambda client: client.chat.completions.parse(**HELLO, response_format=City))
    assert answer.choices[0].message.parsed == City(name="Oslo", people=700_000)
    grammar = server.engine.calls[0].grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert set(json.loads(grammar.value)["properties"]) == {"name", "people"}


def test_several_choices_stand_apart(server: RecordedServer, clients: Clients) -> None:
    events: list[Event] = [Text(0, "a"), Text(1, "b"), Finished(1, "length"), Finished(0, "stop")]
    script: list[Step] = [[Started(4)], [*events, Ended(4, 2)]]
    server.script(script)
    options = {"n": 2, "stop": ["x", "y"], "max_completion_tokens": 3, "seed": 5}
    answer = clients.call(lambda client: client.chat.completions.create(**HELLO, **options))
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    call = server.engine.calls[0]
    assert (call.n, call.ending.stop, call.ending.max_tokens, call.sampling.seed) == (2, ["x", "y"], 3, 5)
    chunks = clients.items(lambda client: client.chat.completions.create(**HELLO, **options, stream=True))
    assert {chunk.choices[0].index for chunk in chunks} == {0, 1}


def test_an_object_of_json_is_asked_for(server: RecordedServer, clients: Clients) -> None:
    server.script(_said("{}"))
    options = {"response_format": {"type": "json_object"}}
    answer = clients.call(lambda client: client.chat.completions.create(**HELLO, **options))
    assert json.loads(answer.choices[0].message.content) == {}
    grammar = server.engine.calls[0].grammar
    assert grammar is not None and grammar.kind == "json_object"


def test_a_prompt_is_completed_whole_and_as_a_stream(clients: Clients) -> None:
    asked = {"model": CHAT, "prompt": "Say", "max_tokens": 5}
    answer = clients.call(lambda client: client.completions.create(**asked, echo=True))
    assert (answer.object, answer.choices[0].text) == ("text_completion", "SayHello you")
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("stop", 6)
    chunks = clients.items(lambda client: client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello you"
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert chunks[-1].usage.completion_tokens == 2


def test_the_raw_response_has_the_id_of_the_request(clients: Clients) -> None:
    raw = clients.call(
        lambda client: client.chat.completions.with_raw_response.create(
            **HELLO, extra_headers={"x-request-id": "mine"}
        )
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["content-type"] == "application/json"
    assert clients.call(lambda client: client.chat.completions.create(**HELLO))._request_id.startswith("req_")


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt-4"}, "NotFoundError", None, "model_not_found"),
        ({"model": DENSE}, "UnprocessableEntityError", "model", None),
        ({"max_tokens": 0}, "UnprocessableEntityError", "max_tokens", None),
        ({"messages": []}, "UnprocessableEntityError", "messages", None),
        ({"tool_choice": "required"}, "UnprocessableEntityError", "tool_choice", None),
    ],
)
def test_refusals_are_typed(clients: Clients, fields: Any, kind: str, param: Any, code: Any) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        clients.call(lambda client: client.chat.completions.create(**(HELLO | fields)))
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"


def test_a_body_that_is_no_json_is_a_bad_request(clients: Clients) -> None:
    headers = {"Content-Type": "application/json"}
    with pytest.raises(openai.BadRequestError) as caught:
        clients.call(
            lambda client: client.post(
                "/chat/completions", cast_to=object, content=b"{", options={"headers": headers}
            )
        )
    assert "malformed JSON" in caught.value.message


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (InputTooLong("70 tokens"), "UnprocessableEntityError", "context_length_exceeded"),
        (QueueFull("no room", retry_after_s=1), "InternalServerError", "server_overloaded"),
        (InferenceFailed("not finite"), "InternalServerError", None),
    ],
)
def test_failures_are_typed_also_before_a_stream(
    server: RecordedServer, clients: Clients, error: Any, kind: str, code: Any
) -> None:
    server.script(error)
    with pytest.raises(getattr(openai, kind)) as caught:
        clients.call(lambda client: client.chat.completions.create(**HELLO))
    assert caught.value.code == code
    with pytest.raises(getattr(openai, kind)):
        clients.items(lambda client: client.chat.completions.create(**HELLO, stream=True))


def test_an_error_inside_a_stream_raises(server: RecordedServer, clients: Clients) -> None:
    server.script([[Started(4)], [Text(0, "Hel")], InferenceFailed("not finite")])
    with pytest.raises(openai.APIError, match="not finite") as caught:
        clients.items(lambda client: client.chat.completions.create(**HELLO, stream=True))
    assert caught.value.type == "server_error"


def test_a_silent_stream_sends_comments(tmp_path: Path) -> None:
    server = RecordedServer(tmp_path, generation__keep_alive_s="0.02")
    server.script([[Started(4)], [Text(0, "a")], None])
    with (
        server.listening() as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
        client.chat.completions.with_streaming_response.create(**HELLO, stream=True) as response,
    ):
        lines = response.iter_lines()
        told = [next(lines) for _ in range(6)]
    assert told[0].startswith("data: {")
    assert told[1:] == ["", ": keep-alive", "", ": keep-alive", ""]
