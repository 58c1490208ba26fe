"""Streams with calls, byte by byte: each notation of a model over three dialects, from its tokens to the bytes.

Worker and frontend are those of a server: tokens become entries, messages, events and bytes. Sockets and routes take no
part. Each answer is told twice, the second time by two workers, of which the first dies within the call.

A section of a recorded file is the whole stream of one answer in one dialect. Only ids of calls (by the order of their
coming), instants and times are replaced. With `RECORD_CALLS=1` in the environment the test writes the files anew, for a
reader who holds each change against the contracts of the dialects.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.engine.events import Ended, Event
from frontend.generation.outcome import Outcome
from frontend.protocols.chat.output import CHUNK, ChatChunks, Envelope
from frontend.protocols.messages.messages import MessageEvents
from frontend.protocols.responses import output as resource
from frontend.protocols.responses.output import Output
from frontend.protocols.responses.resources import NamedEvents
from ipc.wire.messages import GenerateCall, ToolUse
from ipc.wire.streams import ARGUMENTS, CALL_ENDED, Deltas
from tests.fakes.text_worker import TextWorker
from tests.unit.frontend.engine.test_local_generation import Frontend, gathered, generating, on_loop
from tests.unit.frontend.engine.test_streams_carried_on import goes_on, reading
from tests.unit.workers.generation.test_calls_in_pieces import WRAPPED
from tests.unit.workers.generation.test_generation_calls import BUILT
from workers.generation.request import Emission, GenerationRequest, deltas_of
from workers.generation.text import ChoiceOutput, Vocabulary

RECORDED = Path(__file__).with_name("recorded_calls")
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array"}}}
TOOLS = ToolUse([{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}])
WRITTEN = '{"a": "x y\\n", "b": [2.50]}'
"""Arguments as a model writes these, for notations with JSON."""
ARGUMENTS_TOLD = '{"a":"x y\\n","b":[2.5]}'
OWN = {
    "qwen_xml": "<function=f>\n<parameter=a>\nx y\n\n</parameter>\n<parameter=b>\n[2.50]\n</parameter>\n"
    "</function>",
    "gemma4": '<|tool_call>call:f{a:<|"|>x y\n<|"|>,b:[2.50]}<tool_call|>',
    "gemma": '```tool_code\nf(a="x y\\n", b=[2.50])\n```',
    "python": "<function_calls>[f(a='x y\\n', b=[2.50])]</function_calls>",
    "qwen": f'<tool_call>\n{{"arguments": {WRITTEN}, "name": "f"}}\n</tool_call>',
}
"""Notations whose calls leave when these are whole, or in a few pieces."""
NAMES = sorted({*WRAPPED, *OWN})


def answers(name: str) -> list[str]:
    """One call in each notation of a format."""
    in_json = [answer % ("f", WRITTEN) for answer in WRAPPED.get(name, ())]
    return [*in_json, *([OWN[name]] if name in OWN else ())]


@cache
def vocabulary(name: str) -> Vocabulary:
    """The tokens of a format."""
    tokenizer, form = BUILT[name]
    return Vocabulary(tokenizer, form.marks)


def messages(name: str, text: str, known: int = 0) -> Iterator[list[Emission]]:
    """What each token of a text adds, behind `known` tokens that an earlier worker has written."""
    tokenizer, form = BUILT[name]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    request = GenerationRequest("key", [1], GenerateCall(tools=TOOLS), len(tokens) + 1, frozenset())
    request.make_parser = partial(form.parser, "", TOOLS)
    output = ChoiceOutput(vocabulary(name), request, 0)
    for token in tokens[:known]:
        output.push(token, None)
    untold = array("I")
    for token in tokens[known:]:
        untold.append(token)
        if emitted := output.push(token, None):
            emitted[-1].written = untold.tobytes()
            untold = array("I")
            yield emitted
    yield output.finish("stop")


def say(worker: TextWorker, request: int, emitted: Sequence[Emission]) -> None:
    """A worker sends what a step has added."""
    deltas = deltas_of([request] * len(emitted), emitted)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(deltas), type=Deltas)
    worker.channel._dispatch(told, b"")


async def events_of(frontend: Frontend, name: str, text: str, *, dies: bool) -> list[Event]:
    """The events of an answer; with `dies` another worker writes the second half of the call."""
    first, second = frontend.workers
    told = list(messages(name, text))
    async with generating(frontend) as (request, generation):
        if not dies:
            for emitted in told:
                say(first, request, emitted)
            first.end(request)
            return await gathered(generation)
        half = next((at for at, step in enumerate(told) if step[0].kind == ARGUMENTS), len(told) // 2) + 1
        for emitted in told[:half]:
            say(first, request, emitted)
        events = await anext(generation)
        known = sum(len(emission.written) for step in told[:half] for emission in step) // 4
        first.die()
        task = await reading(generation)
        first.revive()
        again = goes_on(second)
        for emitted in messages(name, text, known):
            say(second, again, emitted)
        second.end(again)
        return [*events, *await task, *await gathered(generation)]


def chat(events: Sequence[Event]) -> str:
    """The chunks of a stream of chat."""
    chunks = ChatChunks(Envelope("chatcmpl-1", CHUNK, 7, "m"), 1, logprobs=False, include_usage=False)
    return b"\n".join(chunks.feed(events)).decode()


def responses(events: Sequence[Event]) -> str:
    """The events of a stream of Responses."""
    begun: dict[str, Any] = {"id": "resp_1", "status": "queued", "output": [], "tools": []}
    named = NamedEvents()
    output = Output(begun, named.tell)
    output.take(events)
    return named.end({**resource.ended(begun, output), "completed_at": 9}).decode()


def as_messages(events: Sequence[Event]) -> str:
    """The events of a stream of Messages."""
    return b"".join(MessageEvents("msg_1", "m", logprobs=False).feed(events)).decode()


DIALECTS = {"chat": chat, "responses": responses, "messages": as_messages}


def rendered(events: Sequence[Event]) -> str:
    """A section for each dialect."""
    timed = [
        replace(event, prompt_s=0.25, completion_s=0.5) if isinstance(event, Ended) else event
        for event in events
    ]
    ids: dict[str, str] = {}
    told = "".join(
        f"=== {dialect}\n" + "\n".join(line for line in render(timed).splitlines() if line) + "\n"
        for dialect, render in DIALECTS.items()
    )
    return re.sub(
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        lambda found: ids.setdefault(found[0], f"<id {len(ids)}>"),
        told,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_told_as_it_was_recorded(name: str, tmp_path: Path) -> None:
    told: list[str] = []

    async def work(frontend: Frontend) -> None:
        for text in answers(name):
            events = await events_of(frontend, name, text, dies=False)
            outcome = Outcome(1)
            outcome.take(events)
            [choice] = outcome.choices
            assert [(call.name, call.arguments, call.is_whole) for call in choice.calls] == [
                ("f", ARGUMENTS_TOLD, True)
            ]
            assert choice.reason == "tool_calls" and not choice.text.strip()
            told.append(f"====== {text}\n{rendered(events)}")
            again = await events_of(frontend, name, text, dies=True)
            assert rendered(again) == rendered(events)

    on_loop(tmp_path, work)
    file = RECORDED / f"{name}.txt"
    if os.environ.get("RECORD_CALLS"):
        file.write_text("".join(told))
    assert "".join(told) == file.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_worker_dies_within_calls_that_stream(name: str) -> None:
    for text in answers(name):
        kinds = [emission.kind for step in messages(name, text) for emission in step]
        is_whole_at_once = text == OWN.get(name) and name != "qwen_xml"
        assert kinds.count(CALL_ENDED) == 1
        assert (kinds.count(ARGUMENTS) > 1) is not is_whole_at_once


def test_each_recorded_file_is_of_a_format() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(NAMES)
