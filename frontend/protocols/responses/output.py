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
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from frontend.engine.events import Called, Ended, Event, Finished, Reasoning, Started, Text
from frontend.generation.errors import error_info, status_of
from frontend.generation.outcome import entries_of
from frontend.protocols.responses.requests import Names, ResponsePlan, item_id
from ipc.errors import Draining, ModelError, Overloaded, PenstockError, WorkerFault
from ipc.wire.streams import TokenLogprob

Tell = Callable[..., None]
"""Takes the name of an event, and its fields."""
Item = dict[str, Any]
QUEUED, IN_PROGRESS, COMPLETED, FAILED = "queued", "in_progress", "completed", "failed"
INCOMPLETE, CANCELLED = "incomplete", "cancelled"
UNFINISHED = (QUEUED, IN_PROGRESS)
"""Statuses of a response that goes on."""
Resource = dict[str, Any]


def quiet(name: str, /, **fields: Any) -> None:
    """Tell nobody."""


@dataclass(slots=True)
class _Open:
    """An item whose text still grows."""

    kind: str
    index: int
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that say where their text belongs."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}


@dataclass(slots=True)
class _Choice:
    """One choice while it runs; `opened` says whether it has any item."""

    open: _Open | None = None
    opened: bool = False
    calls: list[Called] = field(default_factory=list)


class Output:
    """The items of one response.

    1. An item opens with its first text, and closes when text of the other kind opens another item, or when its choice
       ends. The calls of a choice follow when the choice ends. A choice that gives nothing is one empty message. Items
       of a response that is cancelled or fails are closed as incomplete.
    2. Items are numbered as they open. Their ids follow from the id of the response and the number, so that a stream
       that is told again has the same ids.
    3. A caller that wants whole output only passes `quiet` for the events.
    """

    def __init__(self, response: dict[str, Any], tell: Tell = quiet) -> None:
        """`response` is the beginning of the response."""
        self._id, self._names, self._tell = response["id"], Names(response["tools"]), tell
        self._items: list[Item | _Open] = []
        self._choices: dict[int, _Choice] = {}
        self._reasons: list[str] = []
        self._started: Started | None = None
        self._ended: Ended | None = None
        self._tokens = self._reasoning_tokens = 0

    def take(self, events: Iterable[Event]) -> None:
        """Take events in their order."""
        for event in events:
            if isinstance(event, Text | Reasoning):
                self._grow(event)
            elif isinstance(event, Called):
                self._choice(event.choice).calls.append(event)
            elif isinstance(event, Finished):
                self._finish(event)
            elif isinstance(event, Ended):
                self._ended = event
            elif isinstance(event, Started):
                self._started = event

    def close(self) -> None:
        """Close the items that still grow as incomplete: no more text comes."""
        for choice in self._choices.values():
            self._close(choice, "incomplete")

    def items(self) -> list[Item]:
        """All items; those that still grow are incomplete."""
        return [self._whole(item, "incomplete") if isinstance(item, _Open) else item for item in self._items]

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
        found = (item["content"] for item in self.items() if item["type"] == kind)
        return "".join(each["text"] for content in found for each in content if each["type"] == part)

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

    def _open(self, choice: _Choice, kind: str) -> _Open:
        index = len(self._items)
        item = choice.open = _Open(kind, index, item_id(kind, self._id, str(index)))
        choice.opened = True
        self._items.append(item)
        self._added(index, _message(item.id, "in_progress") if kind == "message" else _reasoning(item.id))
        if kind == "message":
            self._tell("response.content_part.added", **item.place, part=_text_part(""))
        return item

    def _close(self, choice: _Choice, status: str = "completed") -> None:
        """The open item of a choice has all of its text."""
        item, choice.open = choice.open, None
        if item is None:
            return
        whole = self._items[item.index] = self._whole(item, status)
        [part] = whole["content"]
        if item.kind == "message":
            logprobs = entries_of(item.logprobs)
            self._tell("response.output_text.done", **item.place, text=part["text"], logprobs=logprobs)
            self._tell("response.content_part.done", **item.place, part=part)
        else:
            self._tell("response.reasoning_text.done", **item.place, text=part["text"])
        self._tell("response.output_item.done", output_index=item.index, item=whole)

    def _whole(self, item: _Open, status: str) -> Item:
        text = "".join(item.texts)
        if item.kind == "reasoning":
            return _reasoning(item.id, status, {"type": "reasoning_text", "text": text})
        logprobs = {"logprobs": entries_of(item.logprobs)} if item.logprobs else {}
        return _message(item.id, status, {**_text_part(text), **logprobs})

    def _finish(self, event: Finished) -> None:
        choice = self._choice(event.choice)
        self._reasons.append(event.reason)
        if not choice.opened and not choice.calls:
            self._open(choice, "message")
        if event.logprobs and choice.open is not None and choice.open.kind == "message" and not choice.calls:
            self._grow(Text(event.choice, "", 0, event.logprobs))
        self._close(choice, "incomplete" if event.reason in ("length", "canceled") else "completed")
        for call in choice.calls:
            self._add_call(call)

    def _add_call(self, call: Called) -> None:
        index = len(self._items)
        id_ = item_id("function_call", self._id, str(index))
        names, place = self._names.fields(call.name), {"item_id": id_, "output_index": index}
        begun = {"type": "function_call", "id": id_, "call_id": call.id, **names}
        item = {**begun, "arguments": call.arguments, "status": "completed"}
        self._items.append(item)
        self._added(index, {**begun, "arguments": "", "status": "in_progress"})
        delta = "response.function_call_arguments.delta"
        self._tell(delta, **place, call_id=call.id, delta=call.arguments)
        done = "response.function_call_arguments.done"
        self._tell(done, **place, call_id=call.id, **names, arguments=call.arguments)
        self._tell("response.output_item.done", output_index=index, item=item)

    def _added(self, index: int, item: Item) -> None:
        self._tell("response.output_item.added", output_index=index, item=item)


def _message(id_: str, status: str, *parts: dict[str, Any]) -> Item:
    return {"type": "message", "id": id_, "role": "assistant", "status": status, "content": list(parts)}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _reasoning(id_: str, status: str = "in_progress", *parts: dict[str, Any]) -> Item:
    return {"type": "reasoning", "id": id_, "status": status, "summary": [], "content": list(parts)}


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
        cut = {"incomplete_details": {"reason": "max_output_tokens"}}
        return {**at(begun, INCOMPLETE), **cut, **_told(output)}
    status = CANCELLED if reason == "canceled" else COMPLETED
    done = {"completed_at": int(time.time())} if status == COMPLETED else {}
    return {**at(begun, status), **done, **_told(output)}


def cancelled(begun: Resource, output: Output) -> Resource:
    """The response that somebody cancelled, or whose client went away, with the output so far."""
    return {**at(begun, CANCELLED), **_told(output)}


def failed(begun: Resource, output: Output, error: PenstockError) -> Resource:
    """The response that failed, with the output so far."""
    told = {"type": kind_of(error), "code": _code_of(error), "message": error.message}
    return {**at(begun, FAILED), "error": told, **_told(output)}


def kind_of(error: PenstockError) -> str:
    """The type of an error: of the request, of the model or its worker, or of this server."""
    if status_of(error) < HTTPStatus.INTERNAL_SERVER_ERROR:
        return "validation_error"
    of_model = isinstance(error, ModelError | WorkerFault | Overloaded) and not isinstance(error, Draining)
    return "model_error" if of_model else "internal_error"


def _code_of(error: PenstockError) -> str:
    default = "invalid_prompt" if kind_of(error) == "validation_error" else "server_error"
    return error_info(error).code or default


def _told(output: Output) -> dict[str, Any]:
    """Output, texts and usage; reasoning and usage are left out where there is none."""
    told: dict[str, Any] = {"output": output.items(), "output_text": output.text}
    if reasoning := output.reasoning:
        told["reasoning"] = reasoning
    if output.counts is not None:
        told["usage"] = usage_of(output.counts)
    return told


def usage_of(counts: Ended) -> dict[str, Any]:
    """Token counts in the form of this contract."""
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }
