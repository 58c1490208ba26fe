"""POST /v1/messages and POST /v1/messages/count_tokens: the resources, and the answer, whole and as named events.

1. `message_start` leaves once the prompt is tokenized, with the number of its tokens. A stream that opens before, since
   the request waits, tells 0 tokens there; `message_delta` has the true number always.
2. Blocks come in the order in which the model writes, whole answers included. Text closes a block of reasoning and the
   reverse; a call is a block of its own, whose input leaves piece by piece.
3. `message_delta` waits for the counts of the request.
4. A web search of a run has two blocks, the use of the tool and the pages that the search found. A page that the model
   reads has no block: records and progress events tell of the page.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Annotated, Any, Literal

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.agent import rendering
from frontend.agent.rendering import MAX_FILES, RunCalls, RunFiles, RunSession
from frontend.agent.runner import offer_of, running
from frontend.agent.tools import MAX_USES, SEARCH_TOOL, values_of
from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEvent,
    Calling,
    Completed,
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
from frontend.generation.outcome import Outcome, Spoken, entries_of, finish_reason, object_of
from frontend.generation.protocol import status_of, stream_error
from frontend.generation.requests import named_model, receive
from frontend.generation.running import new_id, send_json, send_stream
from frontend.protocols.messages.requests import MessagesPlan, parse, parse_count
from frontend.scope import RequestScope
from frontend.sending import COMMENT, InferenceRoute, named
from ipc.catalog.entries import ModelEntry
from ipc.errors import PenstockError
from ipc.wire.streams import TokenLogprob

_NO_ID = re.compile("[^A-Za-z0-9_]")
_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


class ServerToolUse(msgspec.Struct):
    """Calls of tools that ran on the server."""

    web_search_requests: Annotated[int, Meta(description="Searches of the web.")]


class MessagesUsage(msgspec.Struct):
    """Tokens of the prompt and of the answer; searches where there were any."""

    input_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    output_tokens: Annotated[int, Meta(description="Generated tokens.")]
    server_tool_use: Annotated[
        ServerToolUse | msgspec.UnsetType, Meta(description="Calls of tools that ran on the server.")
    ] = msgspec.UNSET


class MessagesAnswer(msgspec.Struct):
    """A whole message; `content` has blocks of types thinking, text and tool_use."""

    id: Annotated[str, Meta(description="Id of the message.")]
    type: Annotated[Literal["message"], Meta(description="Names the form of this object.")]
    role: Annotated[Literal["assistant"], Meta(description="Who speaks.")]
    content: Annotated[list[dict[str, Any]], Meta(description="Parts of the answer: text, thinking, calls.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    stop_reason: Annotated[
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
        Meta(description="Why the text ended."),
    ]
    stop_sequence: Annotated[str | None, Meta(description="The stop text that ended the answer.")]
    usage: Annotated[MessagesUsage, Meta(description="Counts of tokens.")]
    logprobs: Annotated[
        dict[str, Any] | msgspec.UnsetType, Meta(description="Log probabilities of the tokens.")
    ] = msgspec.UNSET
    session_id: RunSession = msgspec.UNSET
    agentic_tool_calls: RunCalls = msgspec.UNSET
    files: RunFiles = msgspec.UNSET


def answer_of(identity: str, model: str, outcome: Outcome, logprobs: bool) -> MessagesAnswer:
    """The body; with `logprobs` it has those of all tokens."""
    [choice] = outcome.choices
    content: list[dict[str, Any]] = []
    searches = _search_blocks(outcome.completed)
    content += searches
    content += [block for part in choice.parts if (block := _block_of(part)) is not None]
    begun = {**envelope(identity, model), "content": content}
    stop = stop_of(choice.finished or Finished(0, "canceled"), bool(choice.calls))
    entries = {"content": entries_of(choice.logprobs)} if logprobs else msgspec.UNSET
    return MessagesAnswer(
        **begun,
        **stop,
        usage=usage_of(outcome.counts, len(searches) // 2),
        logprobs=entries,
        session_id=outcome.session_id or msgspec.UNSET,
        agentic_tool_calls=outcome.records or msgspec.UNSET,
        files=outcome.files[:MAX_FILES] or msgspec.UNSET,
    )


def envelope(identity: str, model: str) -> dict[str, Any]:
    """What a message begins with."""
    return {"id": identity, "type": "message", "role": "assistant", "content": [], "model": model}


def thinking_block(text: str) -> dict[str, Any]:
    """A block of reasoning, whose signature is empty."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def call_block(call: CallBegun) -> dict[str, Any]:
    """A block of a call, with no input yet."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _block_of(part: Spoken | GrowingCall) -> dict[str, Any] | None:
    """A block of a whole message; None for a stretch without text."""
    if isinstance(part, GrowingCall):
        # NOTE: arguments are JSON text already, with numbers of any length.
        return {**call_block(part.begun), "input": msgspec.Raw(object_of(part.called).encode())}
    if not (text := part.text):
        return None
    return thinking_block(text) if part.kind is Reasoning else {"type": _TEXT, "text": text}


def stop_of(finished: Finished, has_calls: bool) -> dict[str, Any]:
    """Why the message ended, and the text that ended it."""
    reason = finish_reason(finished, has_calls)
    if reason == "stop" and finished.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
    return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}


def usage_of(counts: Ended, searches: int = 0) -> MessagesUsage:
    """Tokens of the prompt and of the answer, and the number of searches."""
    used = ServerToolUse(searches) if searches else msgspec.UNSET
    return MessagesUsage(counts.prompt_tokens, counts.completion_tokens, used)


PING = named("ping", b'{"type":"ping"}')
_TEXT, _THINKING, _CALL = "text", "thinking", "tool_use"


class MessageEvents:
    """Makes the framed events of one message."""

    def __init__(self, identity: str, model: str, *, logprobs: bool) -> None:
        self._identity, self._model, self._logprobs = identity, model, logprobs
        self._index = -1
        self._open = ""
        self._is_started = False
        self._has_calls = False
        self._unsaid: list[TokenLogprob] = []
        """Log probabilities of the beginning of a call, which its first piece tells."""
        self._finished = Finished(0, "canceled")
        self._session: dict[str, str] = {}
        self._searches = 0

    def feed(self, events: Iterable[Event]) -> list[bytes]:
        """The events of the contract for more events of the generation."""
        framed: list[bytes] = []
        for event in events:
            if isinstance(event, Text):
                framed += self._spoken(_TEXT, event)
            elif isinstance(event, Reasoning):
                framed += self._spoken(_THINKING, event)
            elif isinstance(event, CallEvent):
                framed += self._called(event)
            elif isinstance(event, Finished):
                self._finished = event
            elif isinstance(event, Ended):
                framed += self._end(event)
            elif isinstance(event, Started) and not self._is_started:
                framed.append(self.open(event.prompt_tokens))
            elif isinstance(event, Session):
                self._session = {"session_id": event.id}
            elif isinstance(event, ToolEvent):
                framed += [self.open(), *self._stop(), *self._step(event)]
        return framed

    def _step(self, event: ToolEvent) -> list[bytes]:
        """A named event, and the block of a search beside it."""
        progress = rendering.framed(event)
        if isinstance(event, Calling) and _is_search(event):
            given = orjson.dumps(_input_of(event.arguments)).decode()
            return [*self._block(_use_block(event), given), progress]
        if isinstance(event, Completed) and _is_search(event):
            self._searches += 1
            return [progress, *self._block(_result_block(event))]
        return [progress]

    def open(self, prompt_tokens: int | None = 0) -> bytes:
        """`message_start` with the tokens of the prompt, 0 while they are unknown. Empty if it is told, or for None."""
        if self._is_started or prompt_tokens is None:
            return b""
        self._is_started = True
        message = {**envelope(self._identity, self._model), "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": MessagesUsage(prompt_tokens, 0)})

    def _spoken(self, kind: str, event: Text | Reasoning) -> list[bytes]:
        """A piece of text or of reasoning, in the open block if that is of its kind."""
        if not event.text and not event.logprobs:
            return []
        framed = [] if self._open == kind else self._begin(kind)
        if entries := self._entries(event.logprobs):
            delta = {"type": f"{kind}_delta", kind: event.text}
            framed.append(_event("content_block_delta", index=self._index, delta=delta, **entries))
        else:
            framed.append(_piece(self._index, kind, event.text))
        return framed

    def _entries(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any]:
        """The field that stands beside a delta; none where the request asks for none."""
        return {"logprobs": {"content": entries_of(logprobs)}} if logprobs and self._logprobs else {}

    def _begin(self, kind: str) -> list[bytes]:
        """The end of the open block, and the beginning of another one."""
        block = thinking_block("") if kind == _THINKING else {"type": _TEXT, "text": ""}
        framed = [*self._stop(), self._started(block)]
        self._open = kind
        return framed

    def _stop(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        return [_event("content_block_stop", index=self._index)]

    def _called(self, event: CallEvent) -> list[bytes]:
        """The beginning of a call, a piece of its input, or its end."""
        if isinstance(event, CallBegun):
            self._has_calls, self._unsaid = True, list(event.logprobs or ())
            framed = [*self._stop(), self._started(call_block(event))]
            self._open = _CALL
            return framed
        logprobs, self._unsaid = [*self._unsaid, *(event.logprobs or ())], []
        if isinstance(event, Arguments):
            return [self._input(event.text, logprobs)]
        rest = [self._input("", logprobs)] if self._entries(logprobs) else []
        return [*rest, *self._stop()]

    def _started(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _input(self, text: str, logprobs: list[TokenLogprob] | None = None) -> bytes:
        """A piece of the JSON text of the open block's input."""
        delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=self._index, delta=delta, **self._entries(logprobs))

    def _block(self, block: dict[str, Any], given: str | None = None) -> list[bytes]:
        """A block that is complete; `given` is the JSON text of its input."""
        started = self._started(block)
        delta = [] if given is None else [self._input(given)]
        return [started, *delta, _event("content_block_stop", index=self._index)]

    def _end(self, event: Ended) -> list[bytes]:
        delta = stop_of(self._finished, self._has_calls)
        return [
            *self._stop(),
            _event(
                "message_delta",
                delta=delta,
                usage=usage_of(event, self._searches),
                **self._entries(self._finished.logprobs),
                **self._session,
            ),
            _event("message_stop"),
        ]


def _event(name: str, **fields: Any) -> bytes:
    return named(name, orjson.dumps({"type": name, **fields}, default=msgspec.to_builtins))


def _piece(index: int, kind: str, text: str) -> bytes:
    # PERF: most events of a stream are such pieces.
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
        b'"delta":{"type":"%s_delta","%s":%s}}\n\n'
    ) % (index, kind.encode(), kind.encode(), orjson.dumps(text))


PROTOCOL = "messages"


class MessagesResource(InferenceRoute):
    """One conversation, answered whole or as a stream of named events."""

    operation = "messages"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        read = partial(parse, limits=services.settings.limits, offer=offer_of(services))
        plan = await receive(services, req, read)
        entry, identity = named_model(services, scope, plan.model), new_id("msg_")
        if plan.streams:
            message = MessageEvents(identity, entry.id, logprobs=plan.has_logprobs)
            events = self._events(scope, entry, plan, message)
            await send_stream(
                services, req, resp, events, PROTOCOL, last_event, opening=message.open, idle=COMMENT + PING
            )
            return
        outcome = Outcome(plan.call.n)
        async with running(services, scope, entry, plan.call, plan.agent) as generation:
            await outcome.gather(generation)
        await send_json(resp, partial(answer_of, identity, entry.id, logprobs=plan.has_logprobs), outcome)

    async def _events(
        self, scope: RequestScope, entry: ModelEntry, plan: MessagesPlan, message: MessageEvents
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream; the first once the prompt has been accepted."""
        async with running(self.services, scope, entry, plan.call, plan.agent) as generation:
            yield message.open(generation.prompt_tokens)
            async for events in generation:
                if framed := message.feed(events):
                    yield b"".join(framed)


class TokenCount(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]


class CountTokensResource(InferenceRoute):
    """The number of tokens of a prompt, which is the `input_tokens` of its answer."""

    operation = "count_tokens"

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: str) -> None:
        """One request."""
        services = self.services
        read = partial(parse_count, limits=services.settings.limits, offer=offer_of(services))
        plan = await receive(services, req, read)
        entry = named_model(services, scope, plan.model)
        outcome = Outcome(plan.call.n)
        async with running(services, scope, entry, plan.call, None) as generation:
            await outcome.gather(generation)
        resp.content_type = falcon.MEDIA_JSON
        resp.data = msgspec.json.encode(TokenCount(outcome.counts.prompt_tokens))


def last_event(error: PenstockError) -> tuple[int, bytes]:
    """(status to count, event) of an error that ends a stream."""
    return status_of(error), named("error", orjson.dumps(stream_error(error)))


def _is_search(event: Calling | Completed) -> bool:
    """Whether blocks tell the event."""
    return event.name == SEARCH_TOOL


def _use_block(event: Calling | Completed) -> dict[str, Any]:
    """The block of a search that begins, with no input yet."""
    return {"type": "server_tool_use", "id": _id(event), "name": "web_search", "input": {}}


def _input_of(arguments: str) -> dict[str, Any]:
    """The input of a search; empty for arguments that are no object."""
    values = values_of(arguments)
    return values if isinstance(values, dict) else {}


def _result_block(event: Completed) -> dict[str, Any]:
    """The block of what a search found, or why the search failed."""
    return {"type": "web_search_tool_result", "tool_use_id": _id(event), "content": _content(event)}


def _content(event: Completed) -> Any:
    if "results_count" not in event.data:
        code = MAX_USES if MAX_USES in event.record["result_content"] else "unavailable"
        return {"type": "web_search_tool_result_error", "error_code": code}
    return [
        {"type": "web_search_result", **each, "encrypted_content": "", "page_age": None}
        for each in event.sources
    ]


def _search_blocks(completed: Iterable[Completed]) -> list[dict[str, Any]]:
    """The blocks of all searches of a run."""
    blocks: list[dict[str, Any]] = []
    for event in completed:
        if _is_search(event):
            blocks += [
                {**_use_block(event), "input": _input_of(event.record["arguments"])},
                _result_block(event),
            ]
    return blocks


def _id(event: Calling | Completed) -> str:
    return f"srvtoolu_{_NO_ID.sub('_', event.id)}"
