"""Limits approached from inside: exactly the most that is allowed is taken, and one more is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.generation import conversation, nested, requests
from frontend.generation import fields as sampling
from frontend.generation.conversation import MAX_FUNCTIONS, MAX_FUNCTIONS_NBYTES
from frontend.http import fields
from frontend.protocols.sie import chunking
from frontend.tensors import checking, control, live_settings
from frontend.tensors.live_settings import (
    MAX_MODELS,
    MAX_RATE,
    MAX_VERBOSE,
    Chosen,
    LogState,
    TraceSettings,
    TraceState,
)
from frontend.tensors.request import RegionUse
from ipc.catalog import repository
from ipc.errors import InvalidInput, PenstockError
from ipc.memory.datatypes import MAX_ELEMENTS
from ipc.settings import Limits, load
from ipc.store.regions import MOST_BYTES
from ipc.store.store import Store
from ipc.wire.messages import MAX_CHUNKS
from tests.fakes.generation_server import RecordedServer
from workers.repository import configuration
from workers.repository.layout import ModelRefused

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
ITEMS, TEXT = 300, 4096
"""The limits of the server, above those of the protocols where both count the same."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> RecordedServer:
    """Routes of generated text."""
    limits: dict[str, Any] = {"limits__max_items": ITEMS, "limits__max_text_bytes": TEXT}
    return RecordedServer(tmp_path_factory.mktemp("edges"), **limits)


def _chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [{"role": "user", "content": "hi"}]} | fields


def _messages(**fields: Any) -> tuple[str, Any]:
    return MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5} | fields


def _functions(count: int) -> list[Any]:
    return [{"type": "function", "function": {"name": f"f{number}"}} for number in range(count)]


def _calls(count: int) -> list[Any]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for n in range(count)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(count)]
    return [{"role": "assistant", "tool_calls": calls}, *results]


_ASKED: dict[str, tuple[Callable[[int], tuple[str, Any]], int]] = {
    "choices": (lambda at: _chat(n=at), sampling.MAX_CHOICES),
    "choices of a completion": (
        lambda at: (COMPLETIONS, {"prompt": "x", "n": at}),
        sampling.MAX_CHOICES,
    ),
    "choices to choose from": (
        lambda at: (COMPLETIONS, {"prompt": "x", "best_of": at}),
        sampling.MAX_CHOICES,
    ),
    "choices of all prompts": (
        lambda at: (COMPLETIONS, {"prompt": ["x"] * at}),
        sampling.MAX_CHOICES,
    ),
    "stops": (lambda at: _chat(stop=[f"s{number}" for number in range(at)]), sampling.MAX_STOPS),
    "a stop": (lambda at: _chat(stop="x" * at), sampling.MAX_STOP_NBYTES),
    "a stop of many": (lambda at: _chat(stop=["a", "x" * at]), sampling.MAX_STOP_NBYTES),
    "stops of messages": (
        lambda at: _messages(stop_sequences=[f"s{number}" for number in range(at)]),
        sampling.MAX_STOPS,
    ),
    "biases": (lambda at: _chat(logit_bias={str(token): 1 for token in range(at)}), sampling.MAX_BIASES),
    "a bias": (lambda at: _chat(logit_bias={"1": at}), int(sampling.MAX_BIAS)),
    "a bias below zero": (lambda at: _chat(logit_bias={"1": -at}), int(sampling.MAX_BIAS)),
    "a token of a bias": (lambda at: _chat(logit_bias={str(at): 1}), (1 << 31) - 1),
    "breakers": (
        lambda at: _chat(dry_sequence_breakers=[f"s{number}" for number in range(at)]),
        sampling.MAX_BREAKERS,
    ),
    "alternatives": (lambda at: _chat(logprobs=True, top_logprobs=at), sampling.MAX_ALTERNATIVES),
    "alternatives of a completion": (
        lambda at: (COMPLETIONS, {"prompt": "x", "logprobs": at}),
        sampling.MAX_ALTERNATIVES,
    ),
    "alternatives of a response": (
        lambda at: (RESPONSES, {"input": "x", "top_logprobs": at}),
        sampling.MAX_ALTERNATIVES,
    ),
    "a salt": (lambda at: _chat(cache_salt="x" * at), sampling.MAX_SALT),
    "a seed": (lambda at: _chat(seed=at), (1 << 64) - 1),
    "a seed below zero": (lambda at: _chat(seed=-at), 1 << 63),
    "functions": (lambda at: _chat(tools=_functions(at)), MAX_FUNCTIONS),
    "functions of a response": (
        lambda at: (
            RESPONSES,
            {"input": "x", "tools": [{"type": "function", "name": f"f{number}"} for number in range(at)]},
        ),
        MAX_FUNCTIONS,
    ),
    "functions of messages": (
        lambda at: _messages(
            tools=[{"name": f"f{number}", "input_schema": {"type": "object"}} for number in range(at)]
        ),
        MAX_FUNCTIONS,
    ),
    "calls of a message": (
        lambda at: _chat(messages=[{"role": "user", "content": "x"}, *_calls(at)]),
        MAX_FUNCTIONS,
    ),
    "a grammar": (
        lambda at: _chat(grammar={"type": "regex", "value": "x" * at}),
        nested.MAX_GRAMMAR_NBYTES,
    ),
    "a prompt": (lambda at: (COMPLETIONS, {"prompt": "x" * at}), TEXT),
    "a prompt of many": (lambda at: (COMPLETIONS, {"prompt": ["y", "x" * at]}), TEXT),
    "token ids": (lambda at: (COMPLETIONS, {"prompt": [1] * at}), TEXT // 4),
    "a token id": (lambda at: (COMPLETIONS, {"prompt": [at]}), (1 << 31) - 1),
    "a message": (lambda at: _chat(messages=[{"role": "user", "content": "x" * at}]), TEXT),
    "messages": (lambda at: _chat(messages=[{"role": "user", "content": "x"}] * at), ITEMS),
    "messages of messages": (lambda at: _messages(messages=[{"role": "user", "content": "x"}] * at), ITEMS),
}


@pytest.mark.parametrize("what", _ASKED)
def test_a_request_at_its_limit_reaches_the_model_and_one_beyond_does_not(
    what: str, server: RecordedServer
) -> None:
    ask, limit = _ASKED[what]
    for at, reaches in ((limit, True), (limit + 1, False)):
        before = len(server.engine.works)
        path, body = ask(at)
        response = server.post(path, json.dumps({"model": "tiny/chat"} | body).encode())
        assert (len(server.engine.works) > before) is reaches, (at, response.text[:300])
        assert reaches or response.status_code in (400, 422), response.text[:300]


def _sized_functions(nbytes: int) -> None:
    room = nbytes - len(msgspec.json.encode([{"name": "f", "description": ""}]))
    conversation.tool_use(
        [conversation.Function("f", {"name": "f", "description": "x" * room})], conversation.Choice(), None
    )


def _region(offset: int) -> None:
    checking._check_region(RegionUse("r", offset, 1), "x")


def _input(dims: list[int], name: str = "a") -> str:
    return f'input {{ name: "{name}" data_type: TYPE_FP32 dims: {dims} }}'


def _warmup(count: int) -> str:
    one = 'inputs { key: "a" value { data_type: TYPE_FP32 dims: [1] zero_data: true } }'
    return f'model_warmup {{ name: "w" count: {count} {one} }}'


_CONFIGS: dict[str, tuple[Callable[[int], str], int]] = {
    "max_batch_size": (lambda at: f"max_batch_size: {at}", configuration.MOST_BATCH),
    "queue delay": (
        lambda at: f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: {at} }}",
        configuration.MOST_DELAY_US,
    ),
    "sequence idle": (
        lambda at: f"max_batch_size: 4 sequence_batching {{ max_sequence_idle_microseconds: {at} }}",
        configuration.MOST_IDLE_US,
    ),
    "preferred batch": (
        lambda at: f"max_batch_size: 4 dynamic_batching {{ preferred_batch_size: [ {at} ] }}",
        4,
    ),
    "tensors": (
        lambda at: " ".join(_input([1], f"a{number}") for number in range(at)),
        configuration.MOST_TENSORS,
    ),
    "dimensions": (lambda at: _input([1] * at), configuration.MOST_DIMS),
    "warmups": (lambda at: _input([1]) + " ".join([_warmup(1)] * at), configuration.MOST_WARMUPS),
    "runs of a warmup": (lambda at: _input([1]) + _warmup(at), configuration.MOST_WARMUP_RUNS),
}


@pytest.mark.parametrize("what", _CONFIGS)
def test_a_configuration_at_its_limit_is_read_and_one_beyond_is_refused(what: str) -> None:
    text, limit = _CONFIGS[what]
    head = 'name: "m" platform: "pytorch_libtorch" '
    configuration.convert(configuration.parse_text("config.pbtxt", (head + text(limit)).encode()), "m")
    with pytest.raises(ModelRefused):
        configuration.convert(
            configuration.parse_text("config.pbtxt", (head + text(limit + 1)).encode()), "m"
        )


def test_one_token_is_the_least_and_zero_switches_a_penalty_off() -> None:
    assert sampling.ending_of(1, None).max_tokens == 1
    with pytest.raises(PenstockError):
        sampling.ending_of(0, None)
    off: dict[str, Any] = {
        "repetition_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 0.0,
        "temperature": 0.0,
    }
    assert sampling.sampling_of(sampling.SamplingFields(**off)) == sampling.sampling_of(
        sampling.SamplingFields()
    )


_SETTINGS = load(
    None,
    {
        "repository.control": "explicit",
        "repository.allow_files": "true",
        "repository.max_upload_bytes": "100",
    },
    {},
)
_CALLED: dict[str, tuple[Callable[[int], object], int]] = {
    "bytes of a body of text": (requests._check_nbytes, requests.MOST_NBYTES),
    "bytes of functions": (_sized_functions, MAX_FUNCTIONS_NBYTES),
    "a label": (lambda at: fields.check_labels(["x" * at], Limits()), fields.LONGEST_LABEL),
    "labels": (lambda at: fields.check_labels([str(n) for n in range(at)], Limits()), Limits().max_labels),
    "chunks": (
        lambda at: chunking._check_spans([(n, n + 1) for n in range(at)], at, "x"),
        MAX_CHUNKS,
    ),
    "chunks of an input": (lambda at: chunking.check_inputs(["x"] * at, Limits()), MAX_CHUNKS),
    "dimensions": (lambda at: checking.check_dimensions(at, "x"), checking.MOST_DIMS),
    "a dimension": (lambda at: checking._check_dims([at], "x"), MAX_ELEMENTS),
    "elements of a shape": (lambda at: checking._check_dims([at // 2, 2 + at % 2], "x"), MAX_ELEMENTS),
    "an offset of a region": (_region, MOST_BYTES),
    "files of a load": (
        lambda at: control.read_brought(
            {"config": "{}", **{f"file:1/{n}": b"" for n in range(at)}}, _SETTINGS
        ),
        control.MOST_FILES,
    ),
    "bytes of a load": (
        lambda at: control.read_brought({"config": "{}", "file:1/a": bytes(at)}, _SETTINGS),
        100,
    ),
    "levels of a file of a load": (
        lambda at: control.read_brought({"config": "{}", "file:" + "/".join("a" * at): b""}, _SETTINGS),
        repository.MOST_LEVELS,
    ),
    "a name of a file of a load": (
        lambda at: control.read_brought({"config": "{}", "file:" + "a" * at: b""}, _SETTINGS),
        control.MOST_PART_NBYTES,
    ),
    "a configuration of a load": (
        lambda at: control.read_brought({"config": "x" * at}, _SETTINGS),
        repository.MOST_CONFIG_NBYTES,
    ),
}


@pytest.mark.parametrize("what", _CALLED)
def test_a_value_at_its_limit_is_taken_and_one_beyond_is_refused(what: str) -> None:
    call, limit = _CALLED[what]
    call(limit)
    with pytest.raises(PenstockError):
        call(limit + 1)


def test_live_settings_take_the_most_that_they_name(tmp_path: Path) -> None:
    settings = load(None, {"run.dir": str(tmp_path)}, {})
    settings.paths.store().mkdir()
    traces = TraceSettings(settings, Store(settings.paths), None)

    def refused(change: Callable[[], object]) -> bool:
        try:
            change()
        except InvalidInput:
            return True
        return False

    for level, wrong in ((0, False), (-1, True), (MAX_VERBOSE, False), (MAX_VERBOSE + 1, True)):
        assert refused(partial(live_settings._changed, LogState(), {"log_verbose_level": level})) is wrong
    for name, least in (("trace_rate", 1), ("log_frequency", 0)):
        for value, wrong in ((least, False), (least - 1, True), (MAX_RATE, False), (MAX_RATE + 1, True)):
            assert refused(partial(traces._read, name, str(value))) is wrong
    rows = {f"m{number}": Chosen(trace_rate=5) for number in range(MAX_MODELS - 1)}
    full = traces._changed(TraceState(models=rows), {"trace_rate": "7"}, "new")
    assert len(full.models) == MAX_MODELS
    with pytest.raises(InvalidInput):
        traces._changed(full, {"trace_rate": "7"}, "newer")
