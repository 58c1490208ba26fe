"""Generated text from a real server with tiny models: the same answers over every protocol, alone and in a crowd."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.access import api_keys
from tests.harness.cluster import ways_to
from tests.harness.keys import bearer, write_keys
from tests.harness.later import anthropic, openai
from tests.harness.server import DEVICE, Answer, Server, alive, serving, stopped, wait_until
from tests.tiny import chat_models

MODEL, THINKER = "tiny/chatml", "tiny/qwen3"
KINDS = {MODEL: "chatml", THINKER: "qwen3"}
KEYS = {"one": api_keys.fresh(), "other": api_keys.fresh()}
KEY = KEYS["one"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PROMPTS = ["hello", "tell me a story about the sea", "one two three four five six seven " * 12, "why?"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("chat")
    catalog = root / "catalog"
    catalog.mkdir()
    for name, kind in KINDS.items():
        chat_models.write_entry(catalog, name, chat_models.save(kind, root / kind))
    write_keys(root / "keys.json", {"one": {}, "other": {}}, KEYS)
    settings = {"server.compatible": "vllm", "server.keys_file": root / "keys.json"}
    with serving(root, tuple(KINDS), settings, catalog=catalog, supervised=False) as running:
        yield running


server = ways_to("local", key=lambda _: bearer(KEY))


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def own_client(local: Server) -> Iterator[openai.OpenAI]:
    """Of the server whose workers a test may stop."""
    with openai.OpenAI(base_url=f"{local.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as made:
        yield made


def post(server: Server, path: str, value: Any) -> Answer:
    """The answer to JSON."""
    return server.post(path, value, **bearer(KEY))


def ask(client: openai.OpenAI, prompt: str, **more: Any) -> Any:
    """One chat completion of twelve tokens."""
    more.setdefault("max_tokens", 12)
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": prompt}], **more)


def test_a_stream_tells_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = ask(client, PROMPTS[0])
    chunks = list(ask(client, PROMPTS[0], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens == 12
        assert usage.prompt_tokens == whole.usage.prompt_tokens > 0


def test_a_stream_says_all_of_its_answer_while_its_frontend_is_reloaded(
    local: Server, own_client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS[1], "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    whole, old = ask(own_client, **asked), set(local.frontend_pids())
    with ask(own_client, **asked, stream=True) as stream:
        chunks = [next(stream)]
        # While the worker stands still, the answer cannot end before the new frontend is there.
        with stopped(local.worker_pid()):
            local.process.send_signal(signal.SIGHUP)
            wait_until(lambda: set(local.frontend_pids()) - old, what="a new frontend")
        chunks += stream
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length" and chunks[-1].usage.completion_tokens == 200
    wait_until(lambda: not any(alive(pid) for pid in old), what="the end of the old frontend")
    assert ask(own_client, **asked).choices[0].message.content == said


def test_a_model_that_generates_text_tokenizes_too(server: Server) -> None:
    found = post(server, "/tokenize", {"model": MODEL, "prompt": "hello sea", "add_special_tokens": False})
    assert found.status == 200, found.body
    tokens, longest = found.json()["tokens"], found.json()["max_model_len"]
    assert found.json()["count"] == len(tokens) > 0 and longest > 0
    found = post(server, "/detokenize", {"model": MODEL, "tokens": tokens})
    assert found.json() == {"prompt": "hello sea"}
    refused = post(server, "/detokenize", {"model": MODEL, "tokens": [*tokens, 10**6]})
    assert refused.status == 400 and "token id 1000000 is outside" in refused.json()["error"]["message"]


def test_a_conversation_has_the_tokens_of_its_prompt(server: Server, claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPTS[1]}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    body = {"model": MODEL, "messages": messages}
    tokenized = post(server, "/tokenize", body).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == counted.input_tokens
    said = post(server, "/detokenize", {"model": MODEL, "tokens": tokenized["tokens"]}).json()["prompt"]
    bare = post(server, "/tokenize", {**body, "add_generation_prompt": False}).json()
    assert messages[0]["content"] in said and bare["tokens"] == tokenized["tokens"][: bare["count"]]
    assert bare["count"] < tokenized["count"]


def test_answers_in_a_crowd_are_those_given_alone(server: Server, client: openai.OpenAI) -> None:
    alone = [ask(client, prompt).choices[0].message.content for prompt in PROMPTS]
    sampled = [
        ask(client, prompt, temperature=1.0, seed=7, top_p=0.9).choices[0].message.content
        for prompt in PROMPTS
    ]

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as many:
            asked = [
                many.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=12,
                    extra_body=more,
                )
                for _ in range(3)
                for more in ({}, {"temperature": 1.0, "seed": 7, "top_p": 0.9})
                for prompt in PROMPTS
            ]
            return [str(answer.choices[0].message.content) for answer in await asyncio.gather(*asked)]

    assert asyncio.run(crowd()) == (alone + sampled) * 3


def test_every_protocol_gives_the_same_text_and_counts(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPTS[1]}]
    chat = ask(client, PROMPTS[1])
    message = claude.messages.create(model=MODEL, messages=messages, max_tokens=12)
    response = client.responses.create(model=MODEL, input=PROMPTS[1], max_output_tokens=12)
    with claude.messages.stream(model=MODEL, messages=messages, max_tokens=12) as stream:
        streamed = stream.get_final_message()
    text = chat.choices[0].message.content
    assert message.content[0].type == "text" and message.content[0].text == text
    assert streamed.content[0].type == "text" and streamed.content[0].text == text
    assert streamed.usage.output_tokens == message.usage.output_tokens == 12
    assert response.output_text == text and response.status == "incomplete"
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    assert response.usage is not None
    assert (
        counted.input_tokens
        == message.usage.input_tokens
        == response.usage.input_tokens
        == chat.usage.prompt_tokens
    )


def test_choices_log_probabilities_and_stop_strings(client: openai.OpenAI) -> None:
    answer = ask(client, PROMPTS[0], n=3, temperature=1.0, seed=3, logprobs=True, top_logprobs=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        for each in choice.logprobs.content:
            assert each.logprob <= each.top_logprobs[0].logprob + 1e-6 <= 1e-6
            assert [near.logprob for near in each.top_logprobs] == sorted(
                (near.logprob for near in each.top_logprobs), reverse=True
            )
    text = ask(client, PROMPTS[0], max_tokens=30).choices[0].message.content
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = ask(client, PROMPTS[0], max_tokens=30, stop=[middle, "never there"])
    assert stopped.choices[0].message.content == text.split(middle, 1)[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_completions_continue_texts_tokens_and_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a b c", "d e f"], max_tokens=6, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith("a b c")
    by_ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=6)
    assert by_ids.usage is not None
    assert (by_ids.usage.prompt_tokens, by_ids.usage.completion_tokens) == (3, 6)


def test_a_schema_holds_and_a_forced_call_is_a_call(client: openai.OpenAI) -> None:
    schema = WEATHER["function"]["parameters"]  # type: ignore[index]
    shaped = ask(
        client,
        PROMPTS[0],
        max_tokens=200,
        temperature=1.0,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}},
    )
    found = json.loads(shaped.choices[0].message.content)
    assert found["days"] in (1, 2, 3) and len(found["city"]) <= 8
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        called = client.chat.completions.create(
            model=THINKER,
            messages=[{"role": "user", "content": "Will it rain?"}],
            tools=[WEATHER],  # type: ignore[list-item]
            tool_choice=choice,  # type: ignore[arg-type]
            extra_body={"enable_thinking": False},
        )
        [call] = called.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        assert called.choices[0].finish_reason == "tool_calls"


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "a long story about ships and storms " * 10}]
    first = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=8)
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "and then?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=8)
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert first.usage.prompt_tokens - 16 <= details.cached_tokens <= second.usage.prompt_tokens


def test_another_key_and_another_salt_find_nothing_of_a_prompt(server: Server) -> None:
    prompt = "a secret of one key, which another key tries to guess block by block " * 4
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": f"talk: {prompt}"}]},
        "/v1/completions": {"prompt": f"words: {prompt}"},
        "/v1/responses": {"input": f"answer: {prompt}"},
    }

    def cached(path: str, key: str, **more: Any) -> int:
        body = {"model": MODEL, "max_tokens": 2} | bodies[path] | more
        answer = server.post(path, body, **bearer(KEYS[key]))
        assert answer.status == 200, answer.body
        usage = answer.json()["usage"]
        names = ("prompt_tokens_details", "input_tokens_details")
        [details] = (usage[name] for name in names if name in usage)
        return int(details["cached_tokens"])

    for path in bodies:
        salt = f"sea {path}"
        assert cached(path, "other", cache_salt=salt) == 0
        counts = [cached(path, "one"), cached(path, "other"), cached(path, "one", cache_salt=salt)]
        assert max(counts) < 64, "only the beginning of the template was there before"
        assert min(cached(path, "one"), cached(path, "other")) > 64
        assert cached(path, "one", cache_salt=salt) > 64


def test_a_prompt_over_the_context_is_refused_and_cut_on_demand(local: Server, client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.UnprocessableEntityError, match=f"context of the model is {chat_models.CONTEXT}"
    ):
        ask(client, "word " * 3000)
    cut = ask(client, "word " * 3000, max_tokens=8, extra_body={"truncate_sequence": True})
    assert cut.usage.prompt_tokens == chat_models.CONTEXT - 8
    entries = {entry.id: entry for entry in client.models.list()}
    assert entries[MODEL].model_extra is not None
    assert entries[MODEL].model_extra["max_sequences"] == (32 if DEVICE == "cpu" else 128)
    assert local.metric("penstock_tokens_total", model=MODEL, direction="out") > 0
