"""The output of a response, and the response as an object: how the object begins, and how it ends with the output.

1. `beginning` has the id, the instant and the fields of the request. All events of a stream and the stored response
   repeat the beginning.
2. `Output` grows as neutral events come, and tells the events of the contract.
3. `ended`, `cancelled` and `failed` add the status, the output, and usage, error or reason. Fields without a value are
   left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.agent import rendering
from frontend.engine.events import (
    Arguments,
    CallBegun,
    CallEvent,
    Calling,
    Completed,
    Ended,
    Event,
    Finished,
    Produced,
    Reasoning,
    Session,
    Started,
    Text,
    ToolEvent,
)
from frontend.generation.errors import error_info, status_of
from frontend.generation.outcome import entries_of
from frontend.protocols.responses import items
from frontend.protocols.responses.items import DamagedEvents, Growing
from frontend.protocols.responses.requests import Names, ResponsePlan, container_of, item_id
from ipc.errors import Draining, ModelError, Overloaded, PenstockError, WorkerFault

Tell = Callable[..., None]
"""Takes the name of an event, and its fields."""
Item = dict[str, Any]
QUEUED, IN_PROGRESS, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
INCOMPLETE, CANCELLED = "incomplete", "cancelled"
UNFINISHED = (QUEUED, IN_PROGRESS)
"""Statuses of a response that goes on."""
Resource = dict[str, Any]
Kind = Literal["validation_error", "model_error", "internal_error"]


def quiet(name: str, /, **fields: Any) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class _Choice:
    """One choice while it runs; `opened` says whether it has any item."""

    open: Growing | None = None
    opened: bool = False


class Output:
    """The items of one response.

    1. An item opens with its first text, and closes when another kind of text or a call opens another item, or when its
       choice ends. A call is an item that grows by its arguments. A choice that gives nothing is one empty message.
       Items of a response that is cancelled or fails are closed as incomplete, and so are calls whose arguments break
       off.
    2. Items are numbered as they open. Their ids follow from the id of the response and the number, so that a stream
       that is told again has the same ids.
    3. A caller that wants whole output only passes `quiet` for the events.
    """

    def __init__(self, response: dict[str, Any], tell: Tell = quiet, *, tells_logs: bool = False) -> None:
        """`response` is the beginning of the response; with `tells_logs` events have the output of code."""
        self._id, self._names, self._tell = response["id"], Names(response["tools"]), tell
        self._tells_logs = tells_logs
        self._items: list[Item | Growing] = []
        self._choices: dict[int, _Choice] = {}
        self._reasons: list[str] = []
        self._started: Started | None = None
        self._ended: Ended | None = None
        self._tokens = self._reasoning_tokens = 0
        self.session_id = ""
        self._container = container_of(self._id)
        self._citations: list[dict[str, Any]] = []
        self._calls: dict[str, int] = {}

    def take(self, events: Iterable[Event]) -> None:
        """Take events in their order. Raises `DamagedEvents` for the end of what has not begun."""
        for event in events:
            if isinstance(event, Text | Reasoning):
                self._grow(event)
            elif isinstance(event, CallEvent):
                self._call(event)
            elif isinstance(event, Finished):
                self._finish(event)
            elif isinstance(event, Ended):
                self._ended = event
            elif isinstance(event, Started):
                self._started = event
            elif isinstance(event, ToolEvent):
                self._take_step(event)

    def _take_step(self, event: ToolEvent) -> None:
        """What happens to a call of a tool of this server, or to its session."""
        if isinstance(event, Session):
            self.session_id = event.id
            return
        is_shell = isinstance(event, Calling | Completed) and items.is_shell(event)
        if isinstance(event, Calling):
            self._close(self._choice(0))
            self._choice(0).opened = True
        if not is_shell and (progress := rendering.told(event)):
            self._tell(progress[0], **progress[1])
        if isinstance(event, Calling):
            self._begin_call(event, is_shell)
        elif isinstance(event, Completed):
            self._end_call(event, is_shell)
        elif isinstance(event, Produced) and "code" not in event.file:
            self._citations.append(items.citation(event.file, self._container))

    def _begin_call(self, event: Calling, is_shell: bool) -> None:
        index = len(self._items)
        if is_shell:
            self._calls[event.id] = index
            self._add_whole(
                items.shell_call(item_id(items.SHELL_CALL, self._id, str(index)), event, "completed")
            )
        elif kind := items.open_kind(event):
            item = items.opened(kind, item_id(kind, self._id, str(index)), event, self._container)
            self._calls[event.id] = index
            self._items.append(item)
            self._added(index, items.unwritten(item))
            for name, fields in items.opening(item):
                self._tell(name, item_id=item["id"], output_index=index, **fields)

    def _end_call(self, event: Completed, is_shell: bool) -> None:
        at = self._calls.get(event.id)
        if at is None:
            return
        begun = self._items[at]
        if not isinstance(begun, dict):
            raise DamagedEvents(f"item {at} is no call of a tool of this server")
        if is_shell:
            id_ = item_id(items.SHELL_OUTPUT, self._id, str(len(self._items)))
            self._add_whole(items.shell_output(id_, event, begun["action"]["max_output_length"]))
            return
        item, name = items.closed(begun, event)
        self._items[at] = item
        self._tell(name, item_id=item["id"], output_index=at)
        visible = items.shown(item, tells_logs=self._tells_logs)
        self._tell("response.output_item.done", output_index=at, item=visible)

    def _add_whole(self, item: Item) -> None:
        """An item that is done as soon as the item is there."""
        index = len(self._items)
        self._items.append(item)
        self._added(index, {**item, "status": "in_progress"})
        self._tell("response.output_item.done", output_index=index, item=item)

    def close(self) -> None:
        """Close the items that still grow as incomplete: no more text comes."""
        for choice in self._choices.values():
            self._close(choice, "incomplete")

    def items(self) -> list[Item]:
        """All items; those that have not ended are incomplete."""
        return [
            item.whole(INCOMPLETE) if isinstance(item, Growing) else items.settled(item)
            for item in self._items
        ]

    @property
    def text(self) -> str:
        """The text of all messages."""
        return self._all_text("message", "output_text")

    @property
    def reasoning(self) -> str:
        """The text of all reasoning."""
        return self._all_text("reasoning", "reasoning_text")

    @property
    def reason(self) -> str:
        """Why the generation ended: `length` or `canceled` if any choice did so."""
        return next((reason for reason in ("length", "canceled") if reason in self._reasons), "stop")

    @property
    def counts(self) -> Ended | None:
        """Counts of the request, or what is known of them if it was cut off; None before it has started."""
        if self._ended is not None or self._started is None:
            return self._ended
        return Ended(
            self._started.prompt_tokens, self._tokens, self._reasoning_tokens, self._started.cached_tokens
        )

    def _all_text(self, kind: str, part: str) -> str:
        contents = (item["content"] for item in self.items() if item["type"] == kind)
        return "".join(each["text"] for content in contents for each in content if each["type"] == part)

    def _choice(self, number: int) -> _Choice:
        return self._choices.setdefault(number, _Choice())

    def _grow(self, event: Text | Reasoning) -> None:
        choice, kind = self._choice(event.choice), "message" if isinstance(event, Text) else "reasoning"
        item = choice.open
        if item is None or item.kind != kind:
            self._close(choice)
            item = self._open(choice, kind)
        item.texts.append(event.text)
        self._tokens += event.tokens
        if kind == "message":
            entries = entries_of(event.logprobs or ())
            item.logprobs += event.logprobs or ()
            self._tell("response.output_text.delta", **item.place, delta=event.text, logprobs=entries)
        else:
            self._reasoning_tokens += event.tokens
            self._tell("response.reasoning_text.delta", **item.place, delta=event.text)

    def _open(self, choice: _Choice, kind: str) -> Growing:
        index = len(self._items)
        item = choice.open = Growing(kind, index, item_id(kind, self._id, str(index)))
        choice.opened = True
        self._items.append(item)
        self._added(
            index, items.message(item.id, "in_progress") if kind == "message" else items.reasoning(item.id)
        )
        if kind == "message":
            self._tell("response.content_part.added", **item.place, part=items.text_part(""))
        return item

    def _close(self, choice: _Choice, status: str = "completed") -> None:
        """The open item of a choice has all of its text."""
        item, choice.open = choice.open, None
        if item is None:
            return
        whole = self._items[item.index] = item.whole(status)
        if item.fields:
            fields = {name: value for name, value in item.fields.items() if name != "call_id"}
            done = "response.function_call_arguments.done"
            self._tell(done, **item.place, **fields, arguments=whole["arguments"])
            self._tell("response.output_item.done", output_index=item.index, item=whole)
            return
        [part] = whole["content"]
        if item.kind == "message":
            logprobs = entries_of(item.logprobs)
            self._tell("response.output_text.done", **item.place, text=part["text"], logprobs=logprobs)
            self._tell("response.content_part.done", **item.place, part=part)
        else:
            self._tell("response.reasoning_text.done", **item.place, text=part["text"])
        self._tell("response.output_item.done", output_index=item.index, item=whole)

    def _finish(self, event: Finished) -> None:
        choice = self._choice(event.choice)
        self._reasons.append(event.reason)
        self._cite(choice)
        if not choice.opened:
            self._open(choice, "message")
        if event.logprobs and choice.open is not None and choice.open.kind == "message":
            self._grow(Text(event.choice, "", 0, event.logprobs))
        self._close(choice, "incomplete" if event.reason in ("length", "canceled") else "completed")

    def _cite(self, choice: _Choice) -> None:
        """The files that were made so far stand on the open message, or on one without text."""
        if self._citations:
            item = choice.open
            if item is None or item.kind != "message":
                self._close(choice)
                item = self._open(choice, "message")
            item.annotations, self._citations = self._citations, []

    def _call(self, event: CallEvent) -> None:
        """A call begins, goes on or ends."""
        choice = self._choice(event.choice)
        if isinstance(event, CallBegun):
            self._cite(choice)
            self._close(choice)
            index, kind = len(self._items), "function_call"
            fields = {"call_id": event.id, **self._names.fields(event.name)}
            item = choice.open = Growing(kind, index, item_id(kind, self._id, str(index)), fields)
            choice.opened = True
            self._items.append(item)
            self._added(index, item.whole("in_progress"))
            return
        if choice.open is None or choice.open.kind != "function_call":
            raise DamagedEvents(f"{type(event).__name__} of a call that has not begun")
        if isinstance(event, Arguments):
            choice.open.texts.append(event.text)
            self._tell("response.function_call_arguments.delta", **choice.open.place, delta=event.text)
        else:
            self._close(choice, "completed" if event.is_whole else INCOMPLETE)

    def _added(self, index: int, item: Item) -> None:
        self._tell("response.output_item.added", output_index=index, item=item)


class OutputDetails(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: Annotated[int, Meta(description="Generated tokens that are reasoning.")]


class InputDetails(msgspec.Struct):
    """Prompt tokens that were found in the prefix cache, and those that were written there on purpose."""

    cached_tokens: Annotated[int, Meta(description="Tokens that were found in the prefix cache.")]
    cache_write_tokens: Annotated[int, Meta(description="Always 0: nobody pays for writing.")]


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    input_tokens_details: Annotated[InputDetails, Meta(description="Of the tokens of the inputs.")]
    output_tokens: Annotated[int, Meta(description="Generated tokens.")]
    output_tokens_details: Annotated[OutputDetails, Meta(description="Of the generated tokens.")]
    total_tokens: Annotated[int, Meta(description="Tokens of inputs and answers.")]


class ResponseErrorInfo(msgspec.Struct):
    """Why a response failed."""

    type: Annotated[Kind, Meta(description="Class of the error.")]
    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    message: Annotated[str, Meta(description="What is said.")]


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Annotated[Literal["max_output_tokens"], Meta(description="Why that is so.")]


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response; `output` has items of types reasoning, message and function_call, and items of tools that ran."""

    # A response is stored, continued and repeated in events as a plain object, so the struct only describes.

    id: Annotated[str, Meta(description="Id of the response, by which the response is found later.")]
    object: Annotated[Literal["response"], Meta(description="Names the form of this object.")]
    created_at: Annotated[int, Meta(description="Unix time of the beginning.")]
    completed_at: Annotated[int | msgspec.UnsetType, Meta(description="Unix time of the end.")] = (
        msgspec.UNSET
    )
    status: Annotated[
        Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"],
        Meta(description="The state."),
    ]
    model: Annotated[str, Meta(description="Name of the model.")]
    output: Annotated[
        list[dict[str, Any]], Meta(description="Items of the answer: messages, reasoning, calls.")
    ]
    output_text: Annotated[str | msgspec.UnsetType, Meta(description="All texts of the answer together.")] = (
        msgspec.UNSET
    )
    reasoning: Annotated[str | msgspec.UnsetType, Meta(description="How the model thought.")] = msgspec.UNSET
    usage: Annotated[ResponseUsage | msgspec.UnsetType, Meta(description="Counts of tokens.")] = msgspec.UNSET
    error: Annotated[ResponseErrorInfo | msgspec.UnsetType, Meta(description="What went wrong.")] = (
        msgspec.UNSET
    )
    incomplete_details: Annotated[
        IncompleteDetails | msgspec.UnsetType, Meta(description="Why the answer is not complete.")
    ] = msgspec.UNSET
    background: Annotated[bool, Meta(description="Whether the response goes on without its client.")]
    store: Annotated[bool, Meta(description="Whether the response is kept for later requests.")]
    metadata: Annotated[dict[str, Any], Meta(description="Values of the caller, by name.")]
    parallel_tool_calls: Annotated[
        bool, Meta(description="Whether the model may call several functions at once.")
    ]
    text: Annotated[dict[str, Any], Meta(description="The form of the answer.")]
    tool_choice: Annotated[
        str | dict[str, Any], Meta(description="Whether the model calls functions, and which.")
    ]
    tools: Annotated[
        list[dict[str, Any]], Meta(description="Functions that the model may call, at most 128.")
    ]
    truncation: Annotated[
        Literal["auto", "disabled"],
        Meta(description="`auto`: cut the beginning of a prompt that is too long."),
    ]
    instructions: Annotated[
        str | msgspec.UnsetType, Meta(description="What the model should know before the conversation.")
    ] = msgspec.UNSET
    previous_response_id: Annotated[
        str | msgspec.UnsetType,
        Meta(description="Id of the stored response that the conversation goes on from."),
    ] = msgspec.UNSET
    max_output_tokens: Annotated[
        int | msgspec.UnsetType, Meta(description="Most tokens to generate, at least 1.")
    ] = msgspec.UNSET
    temperature: Annotated[
        float | msgspec.UnsetType,
        Meta(description="Spread of the choice of tokens; 0 or absent: the likeliest token each time."),
    ] = msgspec.UNSET
    top_p: Annotated[
        float | msgspec.UnsetType,
        Meta(description="Keep the likeliest tokens up to this probability together; out of range: off."),
    ] = msgspec.UNSET
    presence_penalty: Annotated[
        float | msgspec.UnsetType, Meta(description="Taken from the logit of each token that has occurred.")
    ] = msgspec.UNSET
    frequency_penalty: Annotated[
        float | msgspec.UnsetType,
        Meta(description="Taken from the logit of a token for each time that the token has occurred."),
    ] = msgspec.UNSET
    top_logprobs: Annotated[
        int | msgspec.UnsetType, Meta(description="Number of alternatives beside each token, 0 to 20.")
    ] = msgspec.UNSET
    session_id: Annotated[
        str | msgspec.UnsetType,
        Meta(description="Session of the tools, or the one that was named."),
    ] = msgspec.UNSET


def beginning(plan: ResponsePlan) -> Resource:
    """The response of a request before anything has run."""
    return {
        "id": plan.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": QUEUED,
        "output": [],
        **plan.fields,
    }


def at(begun: Resource, status: str) -> Resource:
    """The response that began so, with another status."""
    return {**begun, "status": status}


def ended(begun: Resource, output: Output) -> Resource:
    """The response whose generation has ended by itself."""
    reason = output.reason
    if reason == "length":
        cut = {"incomplete_details": msgspec.to_builtins(IncompleteDetails("max_output_tokens"))}
        return {**at(begun, INCOMPLETE), **cut, **_grown(output)}
    status = CANCELLED if reason == "canceled" else COMPLETED
    done = {"completed_at": int(time.time())} if status == COMPLETED else {}
    return {**at(begun, status), **done, **_grown(output)}


def shown(response: Resource, *, tells_logs: bool) -> Resource:
    """The response as clients see the response: with the output of code where they ask for the output."""
    output = [items.shown(item, tells_logs=tells_logs) for item in response["output"]]
    return {**response, "output": output}


def cancelled(begun: Resource, output: Output) -> Resource:
    """The response that somebody cancelled, or whose client went away, with the output so far."""
    return {**at(begun, CANCELLED), **_grown(output)}


def failed(begun: Resource, output: Output, error: PenstockError) -> Resource:
    """The response that failed, with the output so far."""
    info = ResponseErrorInfo(kind_of(error), _code_of(error), error.message)
    return {**at(begun, FAILED), "error": msgspec.to_builtins(info), **_grown(output)}


def kind_of(error: PenstockError) -> Kind:
    """The type of an error: of the request, of the model or its worker, or of this server."""
    if status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "validation_error"
    of_model = isinstance(error, ModelError | WorkerFault | Overloaded) and not isinstance(error, Draining)
    return "model_error" if of_model else "internal_error"


def _code_of(error: PenstockError) -> str:
    default = "invalid_prompt" if kind_of(error) == "validation_error" else "server_error"
    return error_info(error).code or default


def _grown(output: Output) -> dict[str, Any]:
    """Output, texts and usage; reasoning and usage are left out where there is none."""
    fields: dict[str, Any] = {"output": output.items(), "output_text": output.text}
    if reasoning := output.reasoning:
        fields["reasoning"] = reasoning
    if output.counts is not None:
        fields["usage"] = msgspec.to_builtins(usage_of(output.counts))
    if output.session_id:
        fields["session_id"] = output.session_id
    return fields


def usage_of(counts: Ended) -> ResponseUsage:
    """Token counts in the form of this contract."""
    return ResponseUsage(
        counts.prompt_tokens,
        InputDetails(counts.cached_tokens, 0),
        counts.completion_tokens,
        OutputDetails(counts.reasoning_tokens),
        counts.prompt_tokens + counts.completion_tokens,
    )
