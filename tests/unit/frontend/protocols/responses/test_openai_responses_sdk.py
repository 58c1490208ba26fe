"""Responses through the unmodified SDK of OpenAI, sync and async, over a socket to recorded events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from frontend.engine.events import Called, Ended, Finished, Reasoning, Started, Text
from ipc.errors import InferenceFailed, InvalidInput, QueueFull
from ipc.wire.streams import TokenLogprob
from tests.fakes.generation import Step
from tests.fakes.generation_server import ENDED, SCRIPT, RecordedServer, in_pieces
from tests.harness.later import openai
from tests.harness.sdks import Clients, method, of_openai
from tests.harness.server import wait_until

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CALLING: list[Step] = [
    [Started(9, 3)],
    [
        Reasoning(0, "hm"),
        Text(0, "Let me see."),
        *in_pieces(Called(0, 0, "call-1", "weather", '{"city":"Oslo"}')),
    ],
    [Finished(0, "tool_calls", tokens=7), Ended(9, 7, reasoning_tokens=2, cached_tokens=3)],
]


class Running:
    """A server on a socket, and a client for it."""

    def __init__(self, server: RecordedServer, clients: Clients) -> None:
        self.server, self._clients = server, clients

    def call(self, name: str, *given: Any, **fields: Any) -> Any:
        """What a method of the SDK's responses returns."""
        return self._clients.call(lambda client: method(client.responses, name)(*given, **fields))

    def items(self, name: str, *given: Any, **fields: Any) -> list[Any]:
        """All events of a stream, or all entries of a list."""
        return self._clients.items(lambda client: method(client.responses, name)(*given, **fields))

    def helped(self, **fields: Any) -> tuple[list[Any], Any]:
        """Events and the final response of the SDK's helper of streams."""
        return self._clients.helped(lambda client: client.responses.stream(**fields), "get_final_response")


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordedServer, str]]:
    """A server and its address."""
    server = RecordedServer(tmp_path_factory.mktemp("responses"))
    with server.listening() as url:
        yield server, url


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def running(listening: tuple[RecordedServer, str], request: Any) -> Iterator[Running]:
    """The server, which answers "Hello you" and has been asked nothing, and one of the two clients."""
    server, url = listening
    with of_openai(url, is_async=request.param) as clients:
        yield Running(server.anew(), clients)


def test_a_response_is_made_found_and_deleted(running: Running) -> None:
    made = running.call("create", model="default", input="hi", metadata={"a": "b"})
    assert (made.object, made.status, made.output_text, made.model) == (
        "response",
        "completed",
        "Hello you",
        "default",
    )
    [message] = made.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    usage = made.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (4, 2, 6)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert made.completed_at >= made.created_at and made.error is None and made.metadata == {"a": "b"}
    found = running.call("retrieve", made.id)
    assert found.model_dump() == made.model_dump()
    running.call("delete", made.id)
    with pytest.raises(openai.NotFoundError):
        running.call("retrieve", made.id)


def test_a_stream_has_the_events_of_the_contract(running: Running) -> None:
    events = running.items("create", input="hi", stream=True)
    assert [event.sequence_number for event in events] == list(range(10))
    assert {type(event).__name__ for event in events} == {
        "ResponseCreatedEvent",
        "ResponseInProgressEvent",
        "ResponseOutputItemAddedEvent",
        "ResponseContentPartAddedEvent",
        "ResponseTextDeltaEvent",
        "ResponseTextDoneEvent",
        "ResponseContentPartDoneEvent",
        "ResponseOutputItemDoneEvent",
        "ResponseCompletedEvent",
    }
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "Hello you"
    whole = events[-1].response
    assert {event.item_id for event in deltas} == {whole.output[0].id}
    assert whole.output_text == "Hello you" and whole.usage.total_tokens == 6
    assert running.call("retrieve", whole.id).model_dump() == whole.model_dump()


def test_the_helper_of_streams_gathers_text_reasoning_and_calls(running: Running) -> None:
    running.server.script(CALLING)
    events, whole = running.helped(model="default", input="hi", tools=[TOOL], tool_choice="required")
    snapshots = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert snapshots == ["Let me see."]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    call = whole.output[2]
    assert (call.name, call.call_id, call.arguments) == ("weather", "call-1", '{"city":"Oslo"}')
    assert call.parsed_arguments == {"city": "Oslo"}
    assert whole.output[0].content[0].text == "hm"
    assert whole.usage.input_tokens_details.cached_tokens == 3
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    used = running.server.engine.calls[0].tools
    assert used is not None and (used.choice, used.strict) == ("required", ["weather"])


def test_a_call_that_was_cut_off_is_an_incomplete_item(running: Running) -> None:
    cut = in_pieces(Called(0, 0, "call-1", "weather", '{"city":"Os', is_whole=False))
    script: list[Step] = [[Started(9), Text(0, "See."), *cut, Finished(0, "length", tokens=7), Ended(9, 7)]]
    running.server.script(script)
    whole = running.call("create", input="hi", tools=[TOOL])
    running.server.script(script)
    events = running.items("create", input="hi", tools=[TOOL], stream=True)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == ['{"c', "ity", '":"', "Os"]
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        call = response.output[1]
        assert (call.type, call.arguments, call.status) == ("function_call", '{"city":"Os', "incomplete")
    running.server.script(SCRIPT)
    again = running.call("create", input="go on", previous_response_id=whole.id, tools=[TOOL])
    assert again.output_text == "Hello you"
    running.server.script(script)
    with pytest.raises(RuntimeError, match=r"response\.completed"):
        running.helped(model="default", input="hi", tools=[TOOL])


def test_a_conversation_with_a_tool_goes_on(running: Running) -> None:
    running.server.script(CALLING, SCRIPT)
    first = running.call("create", input="Oslo?", tools=[TOOL])
    result = {"type": "function_call_output", "call_id": "call-1", "output": json.dumps({"degrees": 4})}
    second = running.call("create", input=[result], previous_response_id=first.id, tools=[TOOL])
    assert (second.output_text, second.previous_response_id) == ("Hello you", first.id)
    roles = [message["role"] for message in running.server.engine.calls[1].messages or ()]
    assert roles == ["user", "assistant", "tool"]
    given: Any = [{"role": "user", "content": "Oslo?"}, *first.output, result]
    running.call("create", input=given, tools=[TOOL])
    assert running.server.engine.calls[2].messages == running.server.engine.calls[1].messages
    with pytest.raises(openai.NotFoundError):
        running.call("create", input="x", previous_response_id="resp_none")


def test_an_answer_is_parsed_into_a_form(running: Running) -> None:
    class Place(pydantic.BaseModel):
        city: str

    running.server.script([[Started(4)], [Text(0, '{"city":"Rome"}'), Finished(0, "stop"), ENDED]])
    whole = running.call("parse", input="where?", text_format=Place)
    assert whole.output_parsed == Place(city="Rome")
    grammar = running.server.engine.calls[0].grammar
    assert grammar is not None and "city" in json.loads(grammar.value)["properties"]
    _, streamed = running.helped(model="default", input="where?", text_format=Place)
    assert streamed.output_parsed == Place(city="Rome")


def test_input_items_are_listed_to_the_end(running: Running) -> None:
    given: Any = [{"role": "user", "content": str(number)} for number in range(7)]
    made = running.call("create", input=given)
    items = running.items("input_items.list", made.id, limit=3, order="asc")
    assert [item.content[0].text for item in items] == [str(number) for number in range(7)]
    assert len({item.id for item in items}) == 7
    newest = running.items("input_items.list", made.id)
    assert [item.id for item in newest] == [item.id for item in reversed(items)]


def test_a_response_in_the_background_is_polled_and_told_again(running: Running) -> None:
    queued = running.call("create", input="hi", background=True)
    assert (queued.status, queued.background, queued.output_text) == ("queued", True, "")
    done = wait_until(lambda: _ended(running, queued.id))
    assert (done.status, done.output_text) == ("completed", "Hello you")
    events = running.items("retrieve", queued.id, stream=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == "Hello you"
    rest = running.items("retrieve", queued.id, stream=True, starting_after=4)
    assert [event.sequence_number for event in rest] == list(range(5, len(events)))
    helped, whole = running.helped(response_id=queued.id)
    assert [event.type for event in helped] == [event.type for event in events]
    assert whole.output_text == "Hello you"


def _ended(running: Running, id_: str) -> Any:
    found = running.call("retrieve", id_)
    return None if found.status in ("queued", "in_progress") else found


def test_a_cancelled_response_stays_cancelled(running: Running) -> None:
    gate = threading.Event()
    running.server.script([[Started(4)], gate, *SCRIPT[1:]])
    queued = running.call("create", input="hi", background=True)
    assert running.call("cancel", queued.id).status == "cancelled"
    gate.set()
    assert running.call("retrieve", queued.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        running.call("cancel", queued.id)


def test_a_bound_on_tokens_makes_the_response_incomplete(running: Running) -> None:
    running.server.script([[Started(4)], [Text(0, "Hel"), Finished(0, "length"), ENDED]])
    made = running.call("create", input="hi", max_output_tokens=1)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = running.items("create", input="hi", max_output_tokens=1, stream=True)
    assert events[-1].type == "response.incomplete"


def test_log_probabilities_have_texts_and_bytes(running: Running) -> None:
    top = [(7, "é".encode(), -0.5), (8, b"\xff", -1.5)]
    text = Text(0, "é", logprobs=[TokenLogprob(7, "é".encode(), -0.5, top)])
    running.server.script([[Started(4)], [text, Finished(0, "stop"), ENDED]])
    made = running.call("create", input="hi", top_logprobs=2, include=["message.output_text.logprobs"])
    [entry] = made.output[0].content[0].logprobs
    assert (entry.token, entry.logprob, entry.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [each.logprob for each in entry.top_logprobs] == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt-4"}, "NotFoundError", None, "model_not_found"),
        ({"max_output_tokens": 0}, "UnprocessableEntityError", "max_output_tokens", None),
        ({"max_tool_calls": 2}, "UnprocessableEntityError", "max_tool_calls", None),
        ({"tools": [{"type": "web_search"}]}, "UnprocessableEntityError", "tools[0].type", None),
        ({"previous_response_id": "resp_x"}, "NotFoundError", None, None),
    ],
)
def test_refusals_are_typed(running: Running, fields: Any, kind: str, param: Any, code: Any) -> None:
    for stream in (False, True):
        with pytest.raises(getattr(openai, kind)) as raised:
            running.call("create", input="hi", stream=stream, **fields)
        assert (raised.value.param, raised.value.code) == (param, code)


def test_failures_are_typed_also_inside_a_stream(running: Running) -> None:
    running.server.script(QueueFull("no room", retry_after_s=2))
    with pytest.raises(openai.InternalServerError) as raised:
        running.call("create", input="hi", stream=True)
    assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "2")
    running.server.script([[Started(4)], [Text(0, "Hel")], InferenceFailed("not finite")])
    last = running.items("create", input="hi", stream=True)[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "not finite")
    assert running.call("retrieve", last.response.id).status == "failed"
    running.server.script([[Started(4)], InvalidInput("grammar.value: no rule")])
    with pytest.raises(openai.APIError, match="no rule"):
        running.items("create", input="hi", stream=True)


def test_the_raw_response_has_the_id_of_the_request(running: Running) -> None:
    raw = running.call("with_raw_response.create", input="hi", extra_headers={"X-Request-ID": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["content-type"] == "application/json"
