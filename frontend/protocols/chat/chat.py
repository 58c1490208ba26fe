"""POST /v1/chat/completions: the resource, and its answer, whole and as a chunk of JSON for each event.

1. Text and reasoning leave as they come. The role stands on every delta.
2. The calls of a choice leave together, in the chunk with its finish reason.
3. The chunk that finishes the last choice waits for the counts of the request, and has the usage.
4. `include_usage` adds a chunk without choices that has the usage in place of the finishing one: clients add them up.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

import orjson
from falcon.asgi import Request, Response

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text
from frontend.generation import bodies
from frontend.generation.logprobs import entries_of
from frontend.generation.outcome import ChoiceOutcome, Outcome, finish_reason
from frontend.generation.running import named_model, running
from frontend.generation.sending import gathered, send_json
from frontend.protocols.chat.chat_requests import ChatPlan, parse
from frontend.protocols.chat.envelope import Envelope, call_of, last_chunks, send_events, usage_of
from frontend.resources.sending import InferenceRoute
from frontend.scope import RequestScope
from frontend.sse import DONE, data
from ipc.catalog.entries import ModelEntry

OBJECT = "chat.completion"
CHUNK = "chat.completion.chunk"


def answer_of(envelope: Envelope, outcome: Outcome, logprobs: bool) -> dict[str, Any]:
    """The body; with `logprobs` each choice has those of its tokens."""
    return {
        **envelope.fields(),
        "choices": [_choice(index, choice, logprobs) for index, choice in enumerate(outcome.choices)],
        "usage": usage_of(outcome.counts),
    }


def _choice(index: int, choice: ChoiceOutcome, logprobs: bool) -> dict[str, Any]:
    text, reasoning = choice.text, choice.reasoning_text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not choice.calls else None,
        "tool_calls": [call_of(call, indexed=False) for call in choice.calls] or None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    told: dict[str, Any] = {
        "index": index,
        "finish_reason": choice.reason,
        "message": message,
        "logprobs": {"content": entries_of(choice.logprobs)} if logprobs else None,
    }
    if choice.finished is not None and choice.finished.stop is not None:
        told["stop_sequence"] = choice.finished.stop
    return told


class ChatChunks:
    """Makes the chunks of one request with `choices` choices."""

    def __init__(self, envelope: Envelope, choices: int, *, logprobs: bool, include_usage: bool) -> None:
        self._fields = envelope.fields()
        # PERF: the bytes around a text are the same for every chunk of the request.
        self._head = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._open, self._logprobs, self._include_usage = choices, logprobs, include_usage
        self._calls: dict[int, list[Called]] = {}
        self._last: dict[str, Any] | None = None

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The chunks of more events, each the JSON of one `data:` line."""
        chunks: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                chunks.append(self._text(event))
            elif isinstance(event, Reasoning):
                chunks.append(self._reasoning(event))
            elif isinstance(event, Called):
                self._calls.setdefault(event.choice, []).append(event)
            elif isinstance(event, Finished):
                chunks += self._finish(event)
            elif isinstance(event, Ended):
                chunks += self._end(event)
            else:
                assert isinstance(event, Started)
        return chunks

    def _text(self, event: Text) -> bytes:
        if event.logprobs and self._logprobs:
            return self._dumped(event.choice, {"content": event.text, "tool_calls": None}, event.logprobs)
        return b'%s%d,"delta":{"role":"assistant","content":%s,"tool_calls":null},%s' % (
            self._head,
            event.choice,
            orjson.dumps(event.text),
            b'"finish_reason":null,"logprobs":null}],"usage":null}',
        )

    def _reasoning(self, event: Reasoning) -> bytes:
        delta = {"content": None, "tool_calls": None, "reasoning_content": event.text}
        return self._dumped(event.choice, delta, event.logprobs if self._logprobs else None)

    def _dumped(self, choice: int, delta: dict[str, Any], logprobs: Any) -> bytes:
        return orjson.dumps(self._chunk(choice, delta, None, logprobs))

    def _chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        told = {
            "index": choice,
            "delta": {"role": "assistant", **delta},
            "finish_reason": reason,
            "logprobs": {"content": entries_of(logprobs)} if logprobs else None,
        }
        return {**self._fields, "choices": [told], "usage": None}

    def _finish(self, event: Finished) -> list[bytes]:
        """The chunk of a choice that ends; that of the last one waits for the usage."""
        calls = self._calls.pop(event.choice, [])
        told = [call_of(call, indexed=True) for call in calls] or None
        delta = {"content": None if calls else "", "tool_calls": told}
        parts: list[Called | Finished] = [*calls, event] if self._logprobs else []
        logprobs = [token for part in parts for token in part.logprobs or ()]
        chunk = self._chunk(event.choice, delta, finish_reason(event, bool(calls)), logprobs)
        self._open -= 1
        if self._open:
            return [orjson.dumps(chunk)]
        self._last = chunk
        return []

    def _end(self, event: Ended) -> list[bytes]:
        chunks = last_chunks(self._fields, self._last, event, self._include_usage)
        return [orjson.dumps(chunk) for chunk in chunks]


class ChatResource(InferenceRoute):
    """One conversation, answered whole or as a stream of chunks."""

    operation = "chat"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        plan = await bodies.receive(services, req, partial(parse, limits=services.settings.limits))
        entry = named_model(services, scope, plan.model)
        if plan.streams:
            await send_events(services, req, resp, self._chunks(req, scope, entry, plan))
            return
        envelope = Envelope.new("chatcmpl", OBJECT, entry.id)
        render = partial(answer_of, envelope, logprobs=plan.has_logprobs)
        async with running(services, req, scope, entry, plan.call) as generation:
            outcome = await gathered(generation, plan.call.n, render)
        await send_json(resp, render, outcome)

    async def _chunks(
        self, req: Request, scope: RequestScope, entry: ModelEntry, plan: ChatPlan
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty piece once the prompt has been accepted."""
        envelope = Envelope.new("chatcmpl", CHUNK, entry.id)
        chunks = ChatChunks(
            envelope, plan.call.n, logprobs=plan.has_logprobs, include_usage=plan.include_usage
        )
        async with running(self.services, req, scope, entry, plan.call) as generation:
            yield b""
            async for events in generation:
                if made := chunks.feed(events):
                    yield b"".join(map(data, made))
        yield DONE
