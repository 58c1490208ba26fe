"""The unmodified client of ollama, sync and async, over sockets to models that tell recorded events and vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from frontend.engine.events import Called, Ended, Finished, Reasoning, Started, Text
from ipc.errors import InferenceFailed, QueueFull
from ipc.version import VERSION
from ipc.wire.messages import ModelStatus
from ipc.wire.streams import TokenLogprob
from tests.fakes import generation_server, vector_server
from tests.fakes.engine import InProcessDirectory
from tests.fakes.generation import Step
from tests.fakes.generation_server import CHAT, ENDED, RecordedServer
from tests.fakes.vector_server import VectorServer
from tests.harness import sdks
from tests.harness.later import ollama
from tests.harness.sdks import Clients

HI: Any = {"model": CHAT, "messages": [{"role": "user", "content": "hi"}]}
HALF_S = 500_000_000
CALLING: list[Step] = [
    [Started(9)],
    [
        Reasoning(0, "hm"),
        Text(0, "Let me see."),
        *Called(0, 0, "call-1", "weather", '{"city":"Oslo"}').events(),
    ],
    [*Called(0, 1, "call-2", "weather", '{"city":"Rome"}').events()],
    [Finished(0, "tool_calls", tokens=7), Ended(9, 7)],
]


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The name of a city.
    """
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordedServer, str]]:
    """A server of generated text and its address."""
    server = RecordedServer(tmp_path_factory.mktemp("ollama"))
    with server.listening() as url:
        yield server, url


@pytest.fixture
def server(running: tuple[RecordedServer, str]) -> RecordedServer:
    """The server, which answers "Hello you" and has been asked nothing."""
    return running[0].anew()


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def connected(running: tuple[RecordedServer, str], request: Any) -> Iterator[Clients]:
    """A client."""
    kind: Any = ollama.AsyncClient if request.param else ollama.Client
    with sdks.clients(kind, is_async=request.param, host=running[1]) as made:
        yield made


@pytest.fixture
def clients(connected: Clients, server: RecordedServer) -> Clients:
    """A client of the server that has been asked nothing."""
    return connected


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def vectors(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Clients]:
    """A client of a server of vectors."""
    server = VectorServer(tmp_path_factory.mktemp("vectors"))
    kind: Any = ollama.AsyncClient if request.param else ollama.Client
    with (
        generation_server.listening(server.application) as url,
        sdks.clients(kind, is_async=request.param, host=url) as made,
    ):
        yield made


def test_a_conversation_is_answered_with_counts_and_times(clients: Clients) -> None:
    before = datetime.now(UTC)
    answer = clients.call(lambda client: client.chat(**HI))
    assert (answer.model, answer.message.role, answer.message.content) == (CHAT, "assistant", "Hello you")
    assert before <= datetime.fromisoformat(answer.created_at) <= datetime.now(UTC)
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (4, 2)
    assert (answer.prompt_eval_duration, answer.eval_duration) == (HALF_S, HALF_S)
    assert 0 < answer.load_duration < answer.total_duration


def test_a_stream_of_lines(clients: Clients) -> None:
    *lines, last = clients.items(lambda client: client.chat(**HI, stream=True))
    assert [line.message.content for line in lines] == ["Hello", " you"]
    assert not any(line.done or line.done_reason or line.eval_count for line in lines)
    assert (last.message.content, last.done, last.done_reason, last.eval_count) == ("", True, "stop", 2)
    assert 0 < last.load_duration < last.total_duration


def test_a_prompt_is_answered_with_its_system_text(server: RecordedServer, clients: Clients) -> None:
    answer = clients.call(lambda client: client.generate(CHAT, "hi", system="Be brief."))
    assert (answer.response, answer.done, answer.eval_count) == ("Hello you", True, 2)
    [call] = server.engine.calls
    assert call.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    *lines, last = clients.items(lambda client: client.generate(CHAT, "hi", stream=True))
    assert ([line.response for line in lines], last.response, last.done) == (["Hello", " you"], "", True)
    clients.call(lambda client: client.generate(CHAT, "Once", raw=True))
    assert (server.engine.calls[-1].text, server.engine.calls[-1].splits) == ("Once", False)


def test_functions_are_called_and_their_results_are_read(server: RecordedServer, clients: Clients) -> None:
    server.script(CALLING)
    answer = clients.call(lambda client: client.chat(**HI, tools=[weather], think=True))
    assert (answer.message.content, answer.message.thinking) == ("Let me see.", "hm")
    calls = answer.message.tool_calls
    assert [weather(**call.function.arguments) for call in calls] == ["sunny in Oslo", "sunny in Rome"]
    [asked] = server.engine.calls
    assert asked.tools is not None and asked.variables == {"enable_thinking": True}
    assert asked.tools.functions[0]["function"]["parameters"]["required"] == ["city"]
    lines = clients.items(lambda client: client.chat(**HI, tools=[weather], stream=True))
    assert [call.function.arguments["city"] for line in lines for call in line.message.tool_calls or ()] == [
        "Oslo",
        "Rome",
    ]
    talk = [*HI["messages"], answer.message, {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    clients.call(lambda client: client.chat(CHAT, talk))
    _, said, result = server.engine.calls[-1].messages or ()
    assert said["tool_calls"][1]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert (said["reasoning_content"], result["name"]) == ("hm", "weather")


def test_options_reach_the_model(server: RecordedServer, clients: Clients) -> None:
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25, "seed": 7, "num_predict": 9}
    options |= {"stop": ["end"], "repeat_penalty": 1.5, "num_ctx": 4096, "mirostat": 0, "typical_p": 1.0}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    clients.call(lambda client: client.chat(**HI, options=options, format=schema, keep_alive="5m"))
    [call] = server.engine.calls
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.75, 0.25)
    assert (sampling.seed, sampling.repetition_penalty) == (7, 1.5)
    assert (call.ending.max_tokens, call.ending.stop) == (9, ["end"])
    assert call.grammar is not None
    assert (call.grammar.kind, call.grammar.field) == ("json_schema", "format")
    clients.call(lambda client: client.chat(**HI, options={"num_predict": -1, "seed": -1}, format="json"))
    call = server.engine.calls[-1]
    assert (call.ending.max_tokens, call.sampling.seed) == (None, None)
    assert call.grammar is not None and call.grammar.kind == "json_object"


def test_log_probabilities_stand_beside_their_text(server: RecordedServer, clients: Clients) -> None:
    text = Text(0, "é", logprobs=[TokenLogprob(7, "é".encode(), -0.5, [(7, "é".encode(), -0.5)])])
    server.script([[Started(4)], [text, Finished(0, "length"), ENDED]])
    answer = clients.call(lambda client: client.chat(**HI, logprobs=True, top_logprobs=1))
    [entry] = answer.logprobs
    assert (entry.token, entry.logprob, entry.top_logprobs[0].token) == ("é", -0.5, "é")
    assert answer.done_reason == "length"
    lines = clients.items(lambda client: client.chat(**HI, logprobs=True, stream=True))
    assert [len(line.logprobs or ()) for line in lines] == [1, 0]
    assert [call.sampling.logprobs for call in server.engine.calls] == [1, 0]


def test_no_prompt_loads_the_model(server: RecordedServer, clients: Clients) -> None:
    for make in (
        lambda c: c.generate(CHAT),
        lambda c: c.chat(CHAT),
        lambda c: c.generate(CHAT, keep_alive=-1),
    ):
        answer = clients.call(make)
        assert (answer.done, answer.done_reason) == (True, "load")
    with pytest.raises(ollama.ResponseError, match="keep_alive: no model is unloaded"):
        clients.call(lambda client: client.generate(CHAT, keep_alive=0))
    assert server.engine.calls == []


def test_models_are_listed_shown_and_found_by_their_tag(server: RecordedServer, clients: Clients) -> None:
    models = clients.call(lambda client: client.list()).models
    assert [model.model for model in models] == ["tiny/chat:latest", "org/dense:latest"]
    assert {len(model.digest) for model in models} == {64} and models[0].digest != models[1].digest
    clients.call(lambda client: client.chat(**HI))
    [loaded] = clients.call(lambda client: client.ps()).models
    assert (loaded.name, loaded.context_length) == ("tiny/chat:latest", 64)
    assert loaded.expires_at > datetime.now(UTC)
    shown = clients.call(lambda client: client.show("tiny/chat:latest"))
    assert shown.capabilities == ["completion"] and shown.modelinfo["dense.context_length"] == 64
    answer = clients.call(lambda client: client.chat(**(HI | {"model": "tiny/chat:latest"})))
    assert (answer.model, server.engine.works[-1].model) == ("tiny/chat:latest", CHAT)


def test_what_a_worker_tells_of_a_loaded_model_is_shown(
    server: RecordedServer, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(**told: Any) -> Any:
        status = ModelStatus(CHAT, "loaded", max_sequence_length=8192, **told)
        directory = InProcessDirectory(server.services.catalog, [status])
        directory.loaded.add(CHAT)
        monkeypatch.setattr(server.services, "directory", directory)
        return clients.call(lambda client: client.show(CHAT))

    file = shown(
        precision="float32",
        architecture="llama",
        parameters=134515008,
        stored="Q4_1",
        tools="template",
        sees=True,
        template="{{ messages }}",
    )
    assert file.template == "{{ messages }}"
    assert (file.details.family, file.details.families) == ("llama", ["llama"])
    assert (file.details.parameter_size, file.details.quantization_level) == ("134.52M", "Q4_1")
    told = {
        "general.architecture": "llama",
        "general.parameter_count": 134515008,
        "llama.context_length": 8192,
    }
    assert file.modelinfo == told and file.capabilities == ["completion", "tools", "vision"]
    sizes = {8_030_261_248: "8.0B", 2 * 10**9: "2B", 1500: "1.50K", 7: "7", 0: ""}
    for count, size in sizes.items():
        details = shown(precision="bfloat16", architecture="qwen3", parameters=count).details
        assert (details.parameter_size, details.quantization_level) == (size, "BF16")


def test_errors_have_a_status_and_a_text(server: RecordedServer, clients: Clients) -> None:
    def refused(make: Any) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as caught:
            clients.call(make)
        return caught.value.status_code, caught.value.error

    status, text = refused(lambda client: client.chat("none", HI["messages"]))
    assert status == 404 and "tiny/chat" in text
    picture = {"role": "user", "content": "what?", "images": [b"\0"]}
    assert refused(lambda client: client.chat(CHAT, [picture])) == (
        400,
        "messages[0].images[0]: the model 'tiny/chat' takes text only, no images; no loaded model sees",
    )
    server.script(QueueFull("busy"))
    assert refused(lambda client: client.generate(CHAT, "hi")) == (503, "busy")
    server.script([[Started(4)], [Text(0, "Hel")], InferenceFailed("broken")])
    with pytest.raises(ollama.ResponseError, match="broken"):
        clients.items(lambda client: client.generate(CHAT, "hi", stream=True))


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda client: client.pull("m"), "penstock models pull"),
        (lambda client: client.push("m"), "hf upload"),
        (lambda client: client.create("m", from_="x"), "penstock models add"),
        (lambda client: client.copy("a", "b"), "MODEL=NAME"),
        (lambda client: client.delete("m"), "penstock rm NAME"),
    ],
    ids=["pull", "push", "create", "copy", "delete"],
)
def test_what_changes_models_says_what_to_do_instead(clients: Clients, make: Any, instead: str) -> None:
    with pytest.raises(ollama.ResponseError, match=instead) as caught:
        clients.call(make)
    assert caught.value.status_code == 501


def test_vectors_of_length_1_and_of_the_older_route(vectors: Clients) -> None:
    model = f"{vector_server.DENSE}:latest"
    answer = vectors.call(lambda client: client.embed(model, ["abc", ""]))
    length = math.hypot(3, 1)
    assert answer.embeddings[0] == pytest.approx([3 / length, 1 / length, 0])
    assert answer.model == model and answer.total_duration > 0 and len(answer.embeddings) == 2
    cut = vectors.call(lambda client: client.embed(model, "abc", dimensions=1))
    assert cut.embeddings == [[1]]
    older = vectors.call(lambda client: client.embeddings(model, "abc"))
    assert older.embedding == [3, 1, 0]
    long = "x" * (vector_server.LONGEST + 1)
    assert vectors.call(lambda client: client.embed(model, long)).embeddings
    with pytest.raises(ollama.ResponseError, match="the limit is 40") as caught:
        vectors.call(lambda client: client.embed(model, long, truncate=False))
    assert caught.value.status_code == 400


def test_a_client_sees_the_version_of_penstock(server: RecordedServer) -> None:
    assert server.client.simulate_get("/api/version").json == {"version": VERSION}
