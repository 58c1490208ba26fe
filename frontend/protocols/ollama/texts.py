"""POST /api/chat and /api/generate: the resources, and their answers, whole and as lines of JSON.

1. Text, thinking and whole calls leave as they come, each as a line. The last line has `done`, the reason, the
   counts of tokens and the times in nanoseconds.
2. While nothing comes, a line with an empty text keeps the connection open: clients read every line as JSON.
3. An error ends a stream with the line `{"error": text}`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from falcon.asgi import Request, Response
from msgspec import UNSET, Meta, UnsetType

from frontend.engine.events import (
    CallBegun,
    Called,
    CallEnded,
    CallEvent,
    Ended,
    Event,
    Finished,
    GrowingCall,
    Reasoning,
    Text,
)
from frontend.generation.errors import text_of
from frontend.generation.outcome import Outcome, entries_of, object_of
from frontend.generation.requests import named_model, receive
from frontend.generation.running import running, send_json, send_stream
from frontend.http.fields import instant
from frontend.protocols.ollama.requests import TextPlan, known_name, parse_chat, parse_generate
from frontend.scope import RequestScope
from frontend.sending import InferenceRoute, answer_json
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


def _line(body: msgspec.Struct | dict[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"


class OllamaEnd(msgspec.Struct, kw_only=True):
    """The fields that answers and lines share, and those that only an answer and the last line have.

    Times are in nanoseconds.
    """

    model: Annotated[str, Meta(description="Name of the model, as the request has it.")]
    created_at: Annotated[str, Meta(description="Time of the line, as RFC 3339.")]
    done: Annotated[bool, Meta(description="Whether this is the end.")]
    done_reason: Annotated[
        Literal["stop", "length", "load"] | UnsetType, Meta(description="Why the text ended.")
    ] = UNSET
    total_duration: Annotated[int | UnsetType, Meta(description="Time of the whole request.")] = UNSET
    load_duration: Annotated[int | UnsetType, Meta(description="Time until the model was loaded.")] = UNSET
    prompt_eval_count: Annotated[int | UnsetType, Meta(description="Tokens of the prompt.")] = UNSET
    prompt_eval_duration: Annotated[int | UnsetType, Meta(description="Time until the first token.")] = UNSET
    eval_count: Annotated[int | UnsetType, Meta(description="Generated tokens.")] = UNSET
    eval_duration: Annotated[int | UnsetType, Meta(description="Time behind the first token.")] = UNSET
    logprobs: Annotated[
        list[dict[str, Any]] | UnsetType, Meta(description="Log probabilities of the tokens.")
    ] = UNSET


class OllamaAnswerMessage(msgspec.Struct):
    """What the model says, thinks and calls."""

    role: Annotated[Literal["assistant"], Meta(description="Who speaks.")]
    content: Annotated[str, Meta(description="What is said.")]
    thinking: Annotated[str | UnsetType, Meta(description="What the model thought.")] = UNSET
    tool_calls: Annotated[
        list[dict[str, Any]] | UnsetType, Meta(description="Functions that the model calls.")
    ] = UNSET


class OllamaChatAnswer(OllamaEnd, kw_only=True):
    """An answer, or one line of a stream."""

    message: Annotated[OllamaAnswerMessage, Meta(description="What is said.")]


class OllamaGenerateAnswer(OllamaEnd, kw_only=True):
    """An answer, or one line of a stream."""

    response: Annotated[str, Meta(description="The text.")]
    thinking: Annotated[str | UnsetType, Meta(description="What the model thought.")] = UNSET


class TextResource(InferenceRoute):
    """One prompt, answered whole or as a stream of lines, each of which is an `answer`."""

    answer: ClassVar[type[OllamaEnd]]

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
        plan = await receive(services, req, parse, always_json=True, known_name=known_name)
        entry = named_model(services, scope, known_name(plan.model, services.catalog))
        answer = TextAnswer(self, plan.model or entry.id, scope)
        if plan.call is None:
            await services.directory.ensure_loaded(entry.id, scope.waits_until_ns)
            answer_json(resp, answer.line(self.said(""), done=True, done_reason="load"))
        elif plan.streams:
            idle = _line(answer.line(self.said(""), done=False))
            await send_stream(
                services,
                req,
                resp,
                self._lines(scope, entry, plan.call, answer),
                PROTOCOL,
                _last_line,
                opening=lambda: idle,
                idle=idle,
                content_type=LINES,
            )
        else:
            outcome = Outcome(plan.call.n)
            async with running(services, scope, entry, plan.call) as generation:
                await outcome.gather(generation)
            await send_json(resp, answer.whole, outcome)

    async def _lines(
        self, scope: RequestScope, entry: ModelEntry, call: GenerateCall, answer: TextAnswer
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a stream, after an empty piece once the prompt has been accepted."""
        async with running(self.services, scope, entry, call) as generation:
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
        self._call: GrowingCall | None = None

    def line(
        self, said: dict[str, Any], logprobs: Iterable[TokenLogprob] | None = None, **end: Any
    ) -> OllamaEnd:
        """An answer or a line, with the fields of `end`."""
        entries = entries_of(logprobs or ()) or UNSET
        created = instant(time.time())
        return self._route.answer(model=self._name, created_at=created, **said, **end, logprobs=entries)

    def whole(self, outcome: Outcome) -> OllamaEnd:
        """The body of an answer that is no stream."""
        [choice] = outcome.choices
        self._finished = choice.finished
        said = self._route.said(choice.text, choice.reasoning_text, choice.calls)
        return self.line(said, choice.logprobs, **self._end(outcome.counts))

    def feed(self, events: Iterable[Event]) -> list[OllamaEnd]:
        """The lines of more events."""
        lines: list[OllamaEnd] = []
        for event in events:
            if isinstance(event, Text):
                lines.append(self.line(self._route.said(event.text), event.logprobs, done=False))
            elif isinstance(event, Reasoning):
                lines.append(self.line(self._route.said("", event.text), event.logprobs, done=False))
            elif isinstance(event, CallEvent):
                lines += self._called(event)
            elif isinstance(event, Finished):
                self._finished = event
            elif isinstance(event, Ended):
                rest = self._finished.logprobs if self._finished else None
                lines.append(self.line(self._route.said(""), rest, **self._end(event)))
        return lines

    def _called(self, event: CallEvent) -> list[OllamaEnd]:
        """The line of a call that has ended."""
        if isinstance(event, CallBegun):
            self._call = GrowingCall(event)
            return []
        assert self._call is not None
        self._call.take(event)
        if not isinstance(event, CallEnded):
            return []
        call = self._call.called
        return [self.line(self._route.said("", calls=[call]), call.logprobs, done=False)]

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


def _last_line(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, line) of an error that ends a stream."""
    return status_of(error), _line({"error": text_of(error)})


class ChatResource(TextResource):
    """One conversation."""

    operation = "chat"
    answer = OllamaChatAnswer

    def parse(self, body: bytes, limits: Limits) -> TextPlan:
        """As `TextResource`."""
        return parse_chat(body, limits)

    def said(self, text: str, thinking: str = "", calls: Iterable[Called] = ()) -> dict[str, Any]:
        """A message of the assistant."""
        entries = [_call(call) for call in calls]
        return {"message": OllamaAnswerMessage("assistant", text, thinking or UNSET, entries or UNSET)}


class GenerateResource(TextResource):
    """One prompt."""

    operation = "generate"
    answer = OllamaGenerateAnswer

    def parse(self, body: bytes, limits: Limits) -> TextPlan:
        """As `TextResource`."""
        return parse_generate(body, limits)

    def said(self, text: str, thinking: str = "", calls: Iterable[Called] = ()) -> dict[str, Any]:
        """The text; a prompt without functions has no calls."""
        return {"response": text, "thinking": thinking or UNSET}


def _call(call: Called) -> dict[str, Any]:
    """A call, whose arguments are an object with the digits that the model wrote."""
    arguments = msgspec.Raw(object_of(call).encode())
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}}
