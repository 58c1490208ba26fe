"""POST /v1/chat/completions: the request, the resource, and the answer, whole or as a chunk of JSON for each event.

1. `parse` reads the body, and checks everything before a model is looked up.
2. `ChatResource` finds the model and runs the call.
3. `answer_of` makes the whole answer, `ChatChunks` the chunks of a stream. Both begin with the `Envelope`. `DONE`
   ends a stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.agent.rendering import MAX_FILES, RunCalls, RunFiles, RunSession, framed
from frontend.agent.runner import offer_of, running
from frontend.agent.tools import with_own
from frontend.engine.events import (
    Called,
    Ended,
    Event,
    Finished,
    Reasoning,
    Session,
    Started,
    Text,
    ToolEvent,
)
from frontend.generation.conversation import (
    BeginsAnswer,
    ChatMessage,
    ContinuesMessage,
    Function,
    choice_of,
    end_variables,
    functions_of,
    is_continued,
    messages_of,
    tool_use,
)
from frontend.generation.errors import InvalidField, status_of, stream_error
from frontend.generation.fields import (
    ChoiceFields,
    Effort,
    alternatives_of,
    choices_of,
    ending_of,
    salt_of,
    sampling_of,
    template_variables,
)
from frontend.generation.hosted import NOTHING, AgentPlan, Hosted, Offer
from frontend.generation.nested import grammar_of
from frontend.generation.outcome import ChoiceOutcome, Outcome, entries_of, finish_reason
from frontend.generation.running import (
    decode,
    gathered,
    named_model,
    new_id,
    receive,
    send_json,
    send_stream,
)
from frontend.http.fields import one_of
from frontend.protocols.chat.usage import Usage, usage_of
from frontend.scope import RequestScope
from frontend.sending import DONE, InferenceRoute, data
from frontend.services import Services
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.settings import Limits
from ipc.wire.messages import GenerateCall

FINGERPRINT = "local"
PROTOCOL = "chat"
_ALIASES = (("max_tokens", "max_completion_tokens"),)
_MODALITIES = ("text",)
_INSTEAD = "is no tool of chat completions: use POST /v1/responses"
_HINTS = dict.fromkeys(("web_search", "web_search_preview", "shell", "namespace"), _INSTEAD)
OBJECT = "chat.completion"
CHUNK = "chat.completion.chunk"


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


async def send_events(
    services: Services, req: Request, resp: Response, events: AsyncGenerator[bytes, None]
) -> None:
    """Answer with `events`, whose first piece says that the stream has begun. Raises what fails before that."""
    await send_stream(services, req, resp, events, PROTOCOL, last_events)


def last_events(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, events) of an error that ends a stream."""
    return status_of(error), data(orjson.dumps(stream_error(error))) + DONE


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: Annotated[bool | None, Meta(description="Add a last event with the counts of tokens.")] = (
        None
    )


class ChatRequest(ChoiceFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    unserved: ClassVar[Mapping[str, str]] = {
        **ChoiceFields.unserved,
        "audio": "speech is not offered by this server",
        "functions": "this older form of functions is not offered: use tools",
        "function_call": "this older form of a choice is not offered: use tool_choice",
    }
    messages: Annotated[
        list[ChatMessage] | str, Meta(description="The conversation so far, the oldest message first.")
    ]
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of a stream.")] = None
    modalities: Annotated[
        list[Annotated[str, one_of(_MODALITIES, required=True)]] | None,
        Meta(description="Kinds of answers: `text` only, as no model here speaks."),
    ] = None
    audio: Annotated[Any, Meta(description="Refused: no model here speaks.")] = None
    functions: Annotated[Any, Meta(description="Refused: `tools` takes its place.")] = None
    function_call: Annotated[Any, Meta(description="Refused: `tool_choice` takes its place.")] = None
    enable_thinking: Annotated[
        bool | None, Meta(description="Whether the model thinks first; absent: as its template does.")
    ] = None
    reasoning_effort: Annotated[Effort, Meta(description="How long the model thinks.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="Values for the template of the conversation.")
    ] = None
    add_generation_prompt: BeginsAnswer = None
    continue_final_message: ContinuesMessage = None
    truncate_sequence: Annotated[
        bool | None,
        Meta(description="Cut the beginning of a prompt that is too long, in place of a refusal."),
    ] = None


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What to generate, on which model (None: the default), and in which form the answer goes out."""

    model: str | None
    call: GenerateCall
    streams: bool
    include_usage: bool
    agent: AgentPlan | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells log probabilities."""
        return self.call.sampling.logprobs is not None


def parse(body: bytes, limits: Limits, offer: Offer = NOTHING) -> ChatPlan:
    """The plan of a body; `offer` is what this server runs. Raises `MalformedBody` and `InvalidField`.

    The body has the fields of OpenAI, and those that the contract adds. Unknown fields are ignored, null equals absent.
    Messages become a `Conversation`; a bare string is one message of a user.
    """
    request = decode(body, ChatRequest, limits.max_items, _ALIASES)
    request.refuse_unserved()
    streams = bool(request.stream)
    if any(kind not in _MODALITIES for kind in request.modalities or ()):
        raise InvalidField("modalities", "the models of this server answer with text only")
    options = request.stream_options
    usage = streams and options is not None and bool(options.include_usage)
    hosted = Hosted(offer, takes_urls=False)
    functions = functions_of(request.tools, _HINTS, hosted)
    messages = messages_of(request.messages, limits, hosted)
    agent = request.plan(hosted, streams, functions)
    call = _call(request, with_own(functions, agent), [function.name for function in functions], messages)
    return ChatPlan(request.model, call, streams, usage, agent)


def _call(
    request: ChatRequest, functions: list[Function], names: list[str], messages: list[dict[str, Any]]
) -> GenerateCall:
    """The call; `names` are those of the client's functions, which come first."""
    own = [function.name for function in functions[len(names) :]]
    choice = choice_of(request.tool_choice, names, own)
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    limit_name = "max_completion_tokens" if request.max_tokens is None else "max_tokens"
    end = end_variables(request.add_generation_prompt, request.continue_final_message)
    if request.continue_final_message and not is_continued(messages[-1]):
        where = f"messages[{len(messages) - 1}]"
        raise InvalidField(where, "continue_final_message needs a text of the assistant here, without calls")
    return GenerateCall(
        messages=messages,
        tools=tool_use(functions, choice, request.parallel_tool_calls),
        variables=template_variables(
            request.enable_thinking, request.reasoning_effort, request.chat_template_kwargs
        )
        | end,
        sampling=sampling_of(request, alternatives_of(request.logprobs, request.top_logprobs)),
        ending=ending_of(limit, request.stop, request.ignore_eos, names=(limit_name, "stop")),
        grammar=grammar_of(request.response_format, request.grammar),
        n=choices_of(request.n),
        truncate=bool(request.truncate_sequence),
        salt=salt_of(request.cache_salt),
    )


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
    return ChatAnswer(
        **envelope.fields(),
        choices=choices,
        usage=usage_of(outcome.counts),
        session_id=outcome.session_id or msgspec.UNSET,
        agentic_tool_calls=outcome.records or msgspec.UNSET,
        files=outcome.files[:MAX_FILES] or msgspec.UNSET,
    )


def _choice(index: int, choice: ChoiceOutcome, logprobs: bool) -> ChatChoice:
    content = choice.text if choice.text or not choice.calls else None
    calls = list(map(call_of, choice.calls)) or None
    message = AnswerMessage("assistant", content, calls, choice.reasoning_text or msgspec.UNSET)
    entries = {"content": entries_of(choice.logprobs)} if logprobs else None
    stop = choice.finished.stop if choice.finished else None
    reason: Any = choice.reason
    return ChatChoice(index, reason, message, entries, msgspec.UNSET if stop is None else stop)


class ChatChunks:
    """Makes the chunks of one request with `choices` choices.

    1. Text and reasoning leave as they come. The role stands on every delta.
    2. The calls of a choice leave together, in the chunk with its finish reason.
    3. The chunk that finishes the last choice waits for the counts of the request, and has the usage.
    4. `include_usage` adds a chunk without choices that has the usage in place of the finishing one: clients add the
       usages up.
    """

    def __init__(self, envelope: Envelope, choices: int, *, logprobs: bool, include_usage: bool) -> None:
        self._fields = envelope.fields()
        # PERF: the bytes around a text are the same for every chunk of the request.
        self._head = orjson.dumps(self._fields)[:-1] + b',"choices":[{"index":'
        self._open, self._logprobs, self._include_usage = choices, logprobs, include_usage
        self._calls: dict[int, list[Called]] = {}
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
            elif isinstance(event, Called):
                self._calls.setdefault(event.choice, []).append(event)
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
        entries = [{"index": call.index, **msgspec.to_builtins(call_of(call))} for call in calls] or None
        delta = {"content": None if calls else "", "tool_calls": entries}
        parts: list[Called | Finished] = [*calls, event] if self._logprobs else []
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


class ChatResource(InferenceRoute):
    """One conversation, answered whole or as a stream of chunks."""

    operation = "chat"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        read = partial(parse, limits=services.settings.limits, offer=offer_of(services))
        plan = await receive(services, req, read)
        entry = named_model(services, scope, plan.model)
        if plan.streams:
            await send_events(services, req, resp, self._chunks(req, scope, entry, plan))
            return
        envelope = Envelope.new("chatcmpl", OBJECT, entry.id)
        render = partial(answer_of, envelope, logprobs=plan.has_logprobs)
        async with running(services, req, scope, entry, plan.call, plan.agent) as generation:
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
        async with running(self.services, req, scope, entry, plan.call, plan.agent) as generation:
            yield b""
            async for events in generation:
                made = chunks.frame(events) if plan.agent else b"".join(map(data, chunks.feed(events)))
                if made:
                    yield made
        yield DONE
