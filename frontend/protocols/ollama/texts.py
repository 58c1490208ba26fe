"""POST /api/chat and /api/generate: the resources, and their answers, whole and as lines of JSON.

1. Text, thinking and calls leave as they come, each as a line. The last line has `done`, the reason, the counts of
   tokens and the times in nanoseconds.
2. While nothing comes, a line with an empty text keeps the connection open: clients read every line as JSON.
3. An error ends a stream with the line `{"error": text}`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Text
from frontend.generation import bodies
from frontend.generation.errors import text_of
from frontend.generation.outcome import Outcome, entries_of
from frontend.generation.running import named_model, running, send_json, send_stream
from frontend.http.rendering import instant
from frontend.protocols.ollama.requests import TextPlan, known_name, parse_chat, parse_generate
from frontend.resources.sending import InferenceRoute
from frontend.scope import RequestScope
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall
from ipc.wire.streams import TokenLogprob

PROTOCOL = "ollama"
LINES = "application/x-ndjson"
_LENGTH = "length"
_S = 1_000_000_000
"""Nanoseconds of a second."""


def status_of(error: PenstockError) -> int:
    """HTTP status of an error: a wrong value and a value that is too long are 400, as ollama knows no 422."""
    return 400 if error.status == 422 else error.status


def _line(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body) + b"\n"


class TextResource(InferenceRoute):
    """One prompt, answered whole or as a stream of lines."""

    @abstractmethod
    def parse(self, body: bytes, limits: Limits) -> TextPlan:
        """The plan of a body. Raises `MalformedBody` and `InvalidField`."""

    @abstractmethod
    def said(self, text: str, thinking: str = "", calls: Iterable[Called] = ()) -> dict[str, Any]:
        """The fields of an answer, or of a line, that tell what the model says."""

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        parse = partial(self.parse, limits=services.settings.limits)
        plan = await bodies.receive(services, req, parse, always_json=True, known_name=known_name)
        entry = named_model(services, scope, known_name(plan.model, services.catalog))
        answer = TextAnswer(self, plan.model or entry.id, scope)
        if plan.call is None:
            await services.directory.ensure_loaded(entry.id, scope.waits_until_ns)
            resp.content_type = falcon.MEDIA_JSON
            resp.data = orjson.dumps({**answer.head(), **self.said(""), "done": True, "done_reason": "load"})
        elif plan.streams:
            idle = _line({**answer.head(), **self.said(""), "done": False})
            await send_stream(
                services,
                req,
                resp,
                self._lines(req, scope, entry, plan.call, answer),
                PROTOCOL,
                _last_line,
                opening=lambda: idle,
                idle=idle,
                content_type=LINES,
            )
        else:
            outcome = Outcome(plan.call.n)
            async with running(services, req, scope, entry, plan.call) as generation:
                await outcome.gather(generation)
            await send_json(resp, answer.whole, outcome)

    async def _lines(
        self, req: Request, scope: RequestScope, entry: ModelEntry, call: GenerateCall, answer: TextAnswer
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a stream, after an empty piece once the prompt has been accepted."""
        async with running(self.services, req, scope, entry, call) as generation:
            yield b""
            async for events in generation:
                if lines := answer.feed(events):
                    yield b"".join(map(_line, lines))


class TextAnswer:
    """Makes the answer of one request, which calls the model `name`; `scope` knows when the model was loaded."""

    def __init__(self, route: TextResource, name: str, scope: RequestScope) -> None:
        self._route, self._name, self._scope = route, name, scope
        self._began_ns = time.perf_counter_ns()
        self._finished: Finished | None = None

    def head(self) -> dict[str, Any]:
        """The fields at the beginning of every line."""
        return {"model": self._name, "created_at": instant(time.time())}

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        """The body of an answer that is no stream."""
        [choice] = outcome.choices
        self._finished = choice.finished
        said = self._route.said(choice.text, choice.reasoning_text, choice.calls)
        return {**self.head(), **said, **_logprobs(choice.logprobs), **self._end(outcome.counts)}

    def feed(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The lines of more events."""
        lines: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Text):
                lines.append(self._piece(self._route.said(event.text), event.logprobs))
            elif isinstance(event, Reasoning):
                lines.append(self._piece(self._route.said("", event.text), event.logprobs))
            elif isinstance(event, Called):
                lines.append(self._piece(self._route.said("", calls=[event]), event.logprobs))
            elif isinstance(event, Finished):
                self._finished = event
            elif isinstance(event, Ended):
                rest = self._finished.logprobs if self._finished else None
                lines.append({**self.head(), **self._route.said(""), **_logprobs(rest), **self._end(event)})
        return lines

    def _piece(self, said: dict[str, Any], logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        return {**self.head(), **said, "done": False, **_logprobs(logprobs)}

    def _end(self, counts: Ended) -> dict[str, Any]:
        """The end of an answer: reason, tokens, and nanoseconds of the request, the load, the prompt and the text."""
        reason = self._finished.reason if self._finished else ""
        return {
            "done": True,
            "done_reason": _LENGTH if reason == _LENGTH else "stop",
            "total_duration": time.perf_counter_ns() - self._began_ns,
            "load_duration": max(0, self._scope.loaded_ns - self._began_ns),
            "prompt_eval_count": counts.prompt_tokens,
            "prompt_eval_duration": int(counts.prompt_s * _S),
            "eval_count": counts.completion_tokens,
            "eval_duration": int(counts.completion_s * _S),
        }


def _logprobs(tokens: Iterable[TokenLogprob] | None) -> dict[str, Any]:
    """The field of log probabilities, where there are some."""
    entries = entries_of(tokens or ())
    return {"logprobs": entries} if entries else {}


def _last_line(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, line) of an error that ends a stream."""
    return status_of(error), _line({"error": text_of(error)})


class ChatResource(TextResource):
    """One conversation."""

    operation = "chat"

    def parse(self, body: bytes, limits: Limits) -> TextPlan:
        """As `TextResource`."""
        return parse_chat(body, limits)

    def said(self, text: str, thinking: str = "", calls: Iterable[Called] = ()) -> dict[str, Any]:
        """A message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if told := [_call(call) for call in calls]:
            message["tool_calls"] = told
        return {"message": message}


class GenerateResource(TextResource):
    """One prompt."""

    operation = "generate"

    def parse(self, body: bytes, limits: Limits) -> TextPlan:
        """As `TextResource`."""
        return parse_generate(body, limits)

    def said(self, text: str, thinking: str = "", calls: Iterable[Called] = ()) -> dict[str, Any]:
        """The text; a prompt without functions has no calls."""
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _call(call: Called) -> dict[str, Any]:
    """A call, whose arguments are an object with the digits that the model wrote."""
    arguments = orjson.Fragment(call.arguments)
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}
