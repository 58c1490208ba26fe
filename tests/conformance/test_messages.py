"""Messages of Anthropic on a real engine: a tiny model that thinks in tags, over a socket and through the SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from tests.harness.cluster import ways_to
from tests.harness.later import anthropic
from tests.harness.server import Server, serving
from tests.tiny import chat_models

MODEL = "tiny/qwen3"


class Asked(pydantic.BaseModel, extra="forbid"):
    """The arguments of the tool."""

    city: str = pydantic.Field(max_length=8)
    days: Literal[1, 2, 3]


TOOL: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": Asked.model_json_schema(),
    "strict": True,
}
HELLO: Any = {"model": "default", "max_tokens": 12, "messages": [{"role": "user", "content": "Hello there"}]}
BEGUN = {"role": "assistant", "content": "The answer is"}
STILL: Any = {"thinking": {"type": "disabled"}}
_JSON = {"Content-Type": "application/json"}
CONTEXT = chat_models.CONTEXT


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model."""
    place = tmp_path_factory.mktemp("messages")
    catalog = place / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("qwen3", place / "weights"))
    with serving(place, (MODEL,), {"limits.load_wait_s": 60}, catalog, supervised=False) as running:
        yield running


server = ways_to("local")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    """The SDK; it does not retry, so that errors show."""
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as made:
        yield made


def _events(server: Server, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    body = json.dumps(HELLO | {"stream": True} | fields).encode()
    answer = server.request("POST", "/v1/messages", body, _JSON)
    assert answer.headers["content-type"] == "text/event-stream"
    told = []
    for event in answer.body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        told.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return told


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind."},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"messages": [*HELLO["messages"], BEGUN]},
        {"messages": [*HELLO["messages"], BEGUN], "tools": [TOOL]},
        {
            "messages": [
                *HELLO["messages"],
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]},
            ]
        },
    ],
    ids=str,
)
def test_the_count_is_that_of_the_answer_and_of_the_start(
    server: Server, client: anthropic.Anthropic, fields: Any
) -> None:
    asked = HELLO | fields
    counted = client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
    answer = client.messages.create(**asked)
    name, start = _events(server, **fields)[0]
    assert counted.input_tokens == answer.usage.input_tokens > 0
    assert (name, start["message"]["usage"]) == (
        "message_start",
        {"input_tokens": counted.input_tokens, "output_tokens": 0},
    )


def test_a_prompt_over_the_context_is_counted_refused_and_cut(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "word " * CONTEXT}]
    counted = client.messages.count_tokens(model="default", messages=long).input_tokens
    assert counted > CONTEXT
    asked = HELLO | {"messages": long}
    with pytest.raises(anthropic.BadRequestError, match=f"{counted} tokens.*{CONTEXT}.*truncate_sequence"):
        client.messages.create(**asked)
    with pytest.raises(anthropic.BadRequestError, match="truncate_sequence"):
        client.messages.create(**asked, stream=True)
    cut = client.messages.create(**asked, extra_body={"truncate_sequence": True})
    assert cut.usage.input_tokens == CONTEXT - HELLO["max_tokens"]


def test_a_stream_tells_the_same_as_the_whole_answer(server: Server, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**HELLO, **STILL)
    events = _events(server, **STILL)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    [block] = whole.content
    assert block.type == "text" and block.text == text
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"] == {
        "input_tokens": whole.usage.input_tokens,
        "output_tokens": HELLO["max_tokens"],
    }


def test_an_answer_that_a_client_has_begun_goes_on_alike_whole_streamed_and_in_chat(
    server: Server, client: anthropic.Anthropic
) -> None:
    asked = HELLO | {"messages": [*HELLO["messages"], BEGUN]}
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["text"]
    text = "".join(block.text for block in whole.content if block.type == "text")
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_text() == text
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    chat = server.request("POST", "/v1/chat/completions", json.dumps(asked | fields).encode(), _JSON)
    told = json.loads(chat.body)
    assert told["choices"][0]["message"]["content"] == text
    assert told["usage"]["prompt_tokens"] == whole.usage.input_tokens
    begun = client.messages.count_tokens(model="default", messages=HELLO["messages"]).input_tokens
    assert begun < whole.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="cannot end with trailing whitespace"):
        client.messages.create(**HELLO | {"messages": [*HELLO["messages"], BEGUN | {"content": "It "}]})


def test_thoughts_are_told_apart_when_the_model_may_think(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**HELLO, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        message = stream.get_final_message()
    counted = client.messages.count_tokens(
        model="default", messages=HELLO["messages"], thinking={"type": "disabled"}
    )
    assert message.usage.output_tokens == HELLO["max_tokens"]
    assert message.usage.input_tokens != counted.input_tokens, "the template knows the switch"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_a_forced_tool_is_called_with_arguments_of_its_schema(
    client: anthropic.Anthropic, choice: Any
) -> None:
    asked = HELLO | {"max_tokens": 256, "tools": [TOOL], "tool_choice": choice}
    answer = client.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "weather"
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    told = [block for block in streamed.content if block.type == "tool_use"]
    assert streamed.stop_reason == "tool_use" and len(told) == 1
    Asked.model_validate(call.input)
    assert told[0].input == call.input


def test_a_stop_text_ends_the_message_and_is_not_told(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**HELLO, **STILL).content[0]
    assert whole.type == "text"
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = client.messages.create(**HELLO, **STILL, stop_sequences=["never", stop])
    text = cut.content[0].text if cut.content and cut.content[0].type == "text" else ""
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert text == whole.text[: whole.text.index(stop)]


class Form(pydantic.BaseModel):
    """A form of answers."""

    fine: bool
    number: Literal[1, 2]


def test_an_answer_has_the_form_that_was_asked_for(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(**(HELLO | {"max_tokens": 64}), **STILL, output_format=Form)
    assert isinstance(answer.parsed_output, Form)


def test_log_probabilities_are_those_of_the_tokens(client: anthropic.Anthropic) -> None:
    extra = {"logprobs": True, "top_logprobs": 2}
    answer = client.messages.create(**HELLO, **STILL, extra_body=extra)
    entries = (answer.model_extra or {})["logprobs"]["content"]
    assert len(entries) == answer.usage.output_tokens
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    assert entries[0]["logprob"] == entries[0]["top_logprobs"][0]["logprob"], "greedy"


def test_what_only_the_worker_finds_wrong_is_a_bad_request(client: anthropic.Anthropic) -> None:
    for extra, mention in (
        ({"grammar": {"type": "lark", "value": "start: ["}}, "grammar"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=mention):
            client.messages.create(**HELLO, extra_body=extra)


def test_models_know_their_context(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["default", MODEL]
    model = client.models.retrieve(MODEL)
    assert model.max_input_tokens == CONTEXT and (model.model_extra or {})["status"] == "loaded"
