"""Answers of chat, whole or as a chunk of JSON for each event, and the counts of tokens that they end with.

`answer_of` makes the whole answer, `ChatChunks` the chunks of a stream. Both begin with the `Envelope`. Legacy
completions have the same envelope, counts and end of a stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from frontend.agent.rendering import MAX_FILES, RunCalls, RunFiles, RunSession, framed
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
    Session,
    Started,
    Text,
    ToolEvent,
)
from frontend.generation.outcome import ChoiceOutcome, Outcome, entries_of, finish_reason
from frontend.generation.running import new_id
from frontend.sending import data

FINGERPRINT = "local"
OBJECT = "chat.completion"
CHUNK = "chat.completion.chunk"
_NO_END = b'"finish_reason":null,"logprobs":null}],"usage":null}'


class PromptDetails(msgspec.Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: Annotated[int, Meta(description="Tokens that were found in the prefix cache.")]


class CompletionDetails(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: Annotated[int, Meta(description="Generated tokens that are reasoning.")]


class Usage(msgspec.Struct):
    """Token counts, times in seconds, tokens per second."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    completion_tokens: Annotated[int, Meta(description="Generated tokens.")]
    total_tokens: Annotated[int, Meta(description="Tokens of inputs and answers.")]
    avg_tok_per_sec: Annotated[float, Meta(description="Tokens a second over the whole request.")]
    avg_prompt_tok_per_sec: Annotated[
        float, Meta(description="Tokens of the prompt a second until the first token.")
    ]
    avg_compl_tok_per_sec: Annotated[
        float, Meta(description="Generated tokens a second behind the first token.")
    ]
    total_time_sec: Annotated[float, Meta(description="Seconds of the whole request.")]
    total_prompt_time_sec: Annotated[float, Meta(description="Seconds until the first token.")]
    total_completion_time_sec: Annotated[float, Meta(description="Seconds behind the first token.")]
    prompt_tokens_details: Annotated[PromptDetails, Meta(description="Of the tokens of the inputs.")]
    completion_tokens_details: Annotated[CompletionDetails, Meta(description="Of the generated tokens.")]


def usage_of(ended: Ended) -> Usage:
    """Token counts, times in seconds, and tokens per second (0 where no time passed)."""
    total = ended.prompt_tokens + ended.completion_tokens
    total_s = ended.prompt_s + ended.completion_s
    return Usage(
        ended.prompt_tokens,
        ended.completion_tokens,
        total,
        _rate(total, total_s),
        _rate(ended.prompt_tokens, ended.prompt_s),
        _rate(ended.completion_tokens, ended.completion_s),
        round(total_s, 6),
        round(ended.prompt_s, 6),
        round(ended.completion_s, 6),
        PromptDetails(ended.cached_tokens),
        CompletionDetails(ended.reasoning_tokens),
    )


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Envelope:
    """Id, object, instant and model of an answer, whole or in chunks; `created` is in seconds since 1970."""

    id: str
    object: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Envelope:
        """An envelope with a new id, unique over all processes."""
        return cls(new_id(f"{prefix}-"), kind, int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        """The fields in the order of the contract."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def last_chunks(
    fields: dict[str, Any], last: dict[str, Any] | None, ended: Ended, include_usage: bool
) -> list[dict[str, Any]]:
    """The end of a stream: the chunk that finishes the `last` choice, and with `include_usage` one without choices.

    One of both has the usage, since some clients add up the usage of all chunks. `fields` begin each chunk.
    """
    usage = msgspec.to_builtins(usage_of(ended))
    if include_usage:
        return [*([last] if last else []), {**fields, "choices": [], "usage": usage}]
    return [{**last, "usage": usage}] if last else []


def call_of(call: Called) -> ToolCall:
    """A tool call."""
    return ToolCall(call.id, "function", CalledFunctionInfo(call.name, call.arguments))


class CalledFunctionInfo(msgspec.Struct):
    """Name and arguments of a call; the arguments are JSON text."""

    name: Annotated[str, Meta(description="The name.")]
    arguments: Annotated[str, Meta(description="The arguments as JSON text.")]


class ToolCall(msgspec.Struct):
    """A call of a function."""

    id: Annotated[str, Meta(description="Id of the call, to which the result of the tool refers.")]
    type: Annotated[Literal["function"], Meta(description="Kind of the tool.")]
    function: Annotated[CalledFunctionInfo, Meta(description="Name and arguments of a called function.")]


class AnswerMessage(msgspec.Struct):
    """What the model says, calls and thinks."""

    role: Annotated[Literal["assistant"], Meta(description="Who speaks.")]
    content: Annotated[str | None, Meta(description="What is said: a text or parts.")]
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="Functions that the model calls.")]
    reasoning_content: Annotated[
        str | msgspec.UnsetType, Meta(description="What the model thought before its answer.")
    ] = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One choice of an answer."""

    index: Annotated[int, Meta(description="Place in the request's list.")]
    finish_reason: Annotated[
        Literal["stop", "length", "tool_calls", "canceled"], Meta(description="Why the text ended.")
    ]
    message: Annotated[AnswerMessage, Meta(description="What is said.")]
    logprobs: Annotated[dict[str, Any] | None, Meta(description="Log probabilities of the tokens.")]
    stop_sequence: Annotated[
        str | msgspec.UnsetType, Meta(description="The stop text that ended the answer.")
    ] = msgspec.UNSET


class ChatAnswer(msgspec.Struct):
    """A whole answer to a conversation."""

    id: Annotated[str, Meta(description="Id of the answer: `chatcmpl-` and 32 digits.")]
    object: Annotated[Literal["chat.completion"], Meta(description="Names the form of this object.")]
    created: Annotated[int, Meta(description="Unix time of the beginning.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    system_fingerprint: Annotated[str, Meta(description="Always `local`.")]
    choices: Annotated[list[ChatChoice], Meta(description="The texts, by their index.")]
    usage: Annotated[Usage, Meta(description="Counts of tokens.")]
    session_id: RunSession = msgspec.UNSET
    agentic_tool_calls: RunCalls = msgspec.UNSET
    files: RunFiles = msgspec.UNSET


def answer_of(envelope: Envelope, outcome: Outcome, logprobs: bool) -> ChatAnswer:
    """The body; with `logprobs` each choice has those of its tokens."""
    choices = [_choice(index, choice, logprobs) for index, choice in enumerate(outcome.choices)]
    kind: Any = envelope.object
    return ChatAnswer(
        envelope.id,
        kind,
        envelope.created,
        envelope.model,
        FINGERPRINT,
        choices,
        usage_of(outcome.counts),
        session_id=outcome.session_id or msgspec.UNSET,
        agentic_tool_calls=outcome.records or msgspec.UNSET,
        files=outcome.files[:MAX_FILES] or msgspec.UNSET,
    )


def _choice(index: int, choice: ChoiceOutcome, logprobs: bool) -> ChatChoice:
    text, calls = choice.text, [call_of(call) for call in choice.calls] or None
    content = text if text or calls is None else None
    message = AnswerMessage("assistant", content, calls, choice.reasoning_text or msgspec.UNSET)
    entries = {"content": entries_of(choice.logprobs)} if logprobs else None
    stop = choice.finished.stop if choice.finished else None
    reason: Any = choice.reason
    return ChatChoice(index, reason, message, entries, msgspec.UNSET if stop is None else stop)


class ChatChunks:
    """Makes the chunks of one request with `choices` choices.

    1. Text and reasoning leave as they come. The role stands on every delta.
    2. A call leaves as its pieces come. Without `stream_arguments` the calls of a choice leave together, whole, in the
       chunk with its finish reason.
    3. The chunk that finishes the last choice waits for the counts of the request, and has the usage.
    4. `include_usage` adds a chunk without choices that has the usage in place of the finishing one: clients add the
       usages up.
    """

    def __init__(
        self,
        envelope: Envelope,
        choices: int,
        *,
        logprobs: bool,
        include_usage: bool,
        stream_arguments: bool = True,
    ) -> None:
        self._fields = envelope.fields()
        # PERF: the bytes around a text are the same for every chunk of the request.
        self._head = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._open, self._logprobs, self._include_usage = choices, logprobs, include_usage
        self._streams_arguments = stream_arguments
        self._calls: dict[int, list[GrowingCall]] = {}
        self._last: dict[str, Any] | None = None
        self._session: dict[str, str] = {}

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The chunks of more events, each the JSON of one `data:` line."""
        chunks: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                chunks.append(self._text(event))
            elif isinstance(event, Reasoning):
                chunks.append(self._reasoning(event))
            elif isinstance(event, CallEvent):
                chunks += self._called(event)
            elif isinstance(event, Finished):
                chunks += self._finish(event)
            elif isinstance(event, Ended):
                chunks += self._end(event)
            elif isinstance(event, Session):
                self._session = {"session_id": event.id}
            else:
                assert isinstance(event, Started)
        return chunks

    def frame(self, events: Iterable[Event]) -> bytes:
        """The framed chunks and named events of a run with tools of the server."""
        return b"".join(
            framed(event)
            if isinstance(event, ToolEvent) and not isinstance(event, Session)
            else b"".join(map(data, self.feed((event,))))
            for event in events
        )

    def _text(self, event: Text) -> bytes:
        if event.logprobs and self._logprobs:
            return self._dumped(event.choice, {"content": event.text, "tool_calls": None}, event.logprobs)
        return b'%s%d,"delta":{"role":"assistant","content":%s,"tool_calls":null},%s' % (
            self._head,
            event.choice,
            orjson.dumps(event.text),
            _NO_END,
        )

    def _reasoning(self, event: Reasoning) -> bytes:
        delta = {"content": None, "tool_calls": None, "reasoning_content": event.text}
        return self._dumped(event.choice, delta, event.logprobs if self._logprobs else None)

    def _called(self, event: CallEvent) -> list[bytes]:
        """The chunk of a part of a call, if the part leaves now."""
        calls = self._calls.setdefault(event.choice, [])
        if isinstance(event, CallBegun):
            calls.append(GrowingCall(event))
        elif not self._streams_arguments:
            calls[-1].take(event)
        if not self._streams_arguments:
            return []
        logprobs = event.logprobs if self._logprobs else None
        index = calls[-1].begun.index
        if isinstance(event, CallBegun):
            begun = {"index": index, **msgspec.to_builtins(call_of(calls[-1].called))}
            return [self._dumped(event.choice, {"content": None, "tool_calls": [begun]}, logprobs)]
        if isinstance(event, CallEnded):
            delta = {"content": None, "tool_calls": None}
            return [self._dumped(event.choice, delta, logprobs)] if logprobs else []
        if logprobs:
            piece = {"index": index, "function": {"arguments": event.text}}
            return [self._dumped(event.choice, {"content": None, "tool_calls": [piece]}, logprobs)]
        return [
            b'%s%d,"delta":{"role":"assistant","content":null,"tool_calls":[{"index":%d,"function":{"arguments":%s}}]},%s'
            % (self._head, event.choice, index, orjson.dumps(event.text), _NO_END)
        ]

    def _dumped(self, choice: int, delta: dict[str, Any], logprobs: Any) -> bytes:
        return orjson.dumps(self._chunk(choice, delta, None, logprobs))

    def _chunk(
        self, choice: int, delta: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        shown = {
            "index": choice,
            "delta": {"role": "assistant", **delta},
            "finish_reason": reason,
            "logprobs": {"content": entries_of(logprobs)} if logprobs else None,
        }
        return {**self._fields, "choices": [shown], "usage": None}

    def _finish(self, event: Finished) -> list[bytes]:
        """The chunk of a choice that ends; that of the last one waits for the usage."""
        calls = [call.called for call in self._calls.pop(event.choice, ())]
        whole = [] if self._streams_arguments else calls
        entries = [{"index": call.index, **msgspec.to_builtins(call_of(call))} for call in whole] or None
        delta = {"content": None if calls else "", "tool_calls": entries}
        parts: list[Called | Finished] = [*whole, event] if self._logprobs else []
        logprobs = [token for part in parts for token in part.logprobs or ()]
        chunk = self._chunk(event.choice, delta, finish_reason(event, bool(calls)), logprobs)
        self._open -= 1
        if self._open:
            return [orjson.dumps(chunk)]
        self._last = chunk
        return []

    def _end(self, event: Ended) -> list[bytes]:
        *chunks, last = last_chunks(self._fields, self._last, event, self._include_usage) or [{}]
        return [orjson.dumps(chunk) for chunk in (*chunks, {**last, **self._session}) if chunk]
