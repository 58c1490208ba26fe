"""The rounds of one run as a state machine without I/O: what the model is asked, which calls run, what the client sees.

1. `call` is what the model is asked in the present round. `take` takes the neutral events of the round, and gives back
   those that the client sees now: calls and the end of a round are held until it is known who runs the calls. If the
   first call of a round is the client's, all calls of the round are, and pass as they come.
2. `turn`, at the end of a round, says which calls run here. Calls of one turn run in order, up to the first call that
   is the client's. That call and all later ones are returned to the client.
3. `answer` takes what a tool gave. `advance` begins the next round, or says that the run has ended: no call ran, the
   cap is reached, the text was cut, or a call was returned. `end` gives the events of the end.
4. A client that comes back with the results of its calls finds the server's calls of that turn still to run:
   `unanswered`, before the first round.

`Started` is told once, tokens and times are sums over the rounds. A choice that is forced holds until a call has run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import orjson

from frontend.engine.events import (
    CallBegun,
    Called,
    CallEvent,
    Ended,
    Event,
    Finished,
    GrowingCall,
    Reasoning,
    Started,
    Text,
)
from frontend.generation.errors import InvalidField
from frontend.generation.nested import arguments_of, values_of
from frontend.generation.pictures import Content, texts_of
from ipc.wire.messages import GenerateCall

Message = dict[str, Any]
"""A message as chat templates read messages."""
_CUT = ("length", "canceled")
"""Reasons of an end behind which nothing goes on."""


@dataclass(slots=True)
class _Said:
    """What the model has told in the present round."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    is_clients: bool = False
    """Whether the first call is the client's, so that none of the round runs here."""
    growing: list[GrowingCall] = field(default_factory=list)
    finished: Finished = field(default_factory=lambda: Finished(0, "canceled"))

    @property
    def calls(self) -> list[Called]:
        """The calls so far."""
        return [call.called for call in self.growing]

    def message(self, calls: Sequence[Called]) -> Message:
        """The turn of the assistant, with these of its calls."""
        text = "".join(self.texts)
        message: Message = {"role": "assistant", "content": text if text or not calls else None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if calls:
            message["tool_calls"] = [_call_entry(call) for call in calls]
        return message


class Loop:
    """One run. `round` counts the turns of the model whose calls have run, from 0."""

    def __init__(
        self,
        call: GenerateCall,
        messages: Sequence[Message],
        note: str,
        hosted: Collection[str],
        most_rounds: int,
    ) -> None:
        """`call` without messages; `note` is what the model is told beside `messages`, and no session keeps.

        `hosted` names the tools that run here, for at most `most_rounds` rounds.
        """
        self._call, self._note, self._hosted, self._most_rounds = call, note, hosted, most_rounds
        self.messages = list(messages)
        self.round = 0
        self._said = _Said()
        self._run: list[Called] = []
        self._returned: list[Called] = []
        self._ends: list[Ended] = []
        self._is_started = False

    @property
    def call(self) -> GenerateCall:
        """What the model is asked in the present round."""
        tools = self._call.tools
        if tools is not None and self.round:
            tools = msgspec.structs.replace(tools, choice="auto", name="")
        messages = _with_note(self.messages, self._note)
        return msgspec.structs.replace(self._call, messages=messages, tools=tools)

    def take(self, events: Iterable[Event]) -> list[Event]:
        """Take events of the model; those that the client sees now."""
        shown: list[Event] = []
        for event in events:
            if isinstance(event, CallEvent):
                shown += self._take_call(event)
            elif isinstance(event, Finished):
                self._said.finished = event
            elif isinstance(event, Ended):
                self._ends.append(event)
            elif isinstance(event, Started):
                shown += [] if self._is_started else [event]
                self._is_started = True
            else:
                if isinstance(event, Text):
                    self._said.texts.append(event.text)
                elif isinstance(event, Reasoning):
                    self._said.reasoning.append(event.text)
                shown.append(event)
        return shown

    def _take_call(self, event: CallEvent) -> list[Event]:
        """A part of a call, which the client sees now if the call goes to the client in any case."""
        said = self._said
        if isinstance(event, CallBegun):
            said.is_clients |= not said.growing and event.name not in self._hosted
            said.growing.append(GrowingCall(event))
        else:
            said.growing[-1].take(event)
        return [event] if said.is_clients else []

    def unanswered(self) -> list[Called]:
        """Calls of the last turn of the conversation that run here and have no result yet, before the first round."""
        at = next((k for k in reversed(range(len(self.messages))) if self.messages[k]["role"] != "tool"), -1)
        if at < 0 or not self._most_rounds:
            return []
        answered = {message.get("tool_call_id") for message in self.messages[at + 1 :]}
        calls = [_called(index, entry) for index, entry in enumerate(self.messages[at].get("tool_calls", ()))]
        return [call for call in calls if call.name in self._hosted and call.id and call.id not in answered]

    def turn(self) -> list[Called]:
        """The calls of the round that run here, in order; without any the run has ended."""
        calls, cut = self._said.calls, self._said.finished.reason in _CUT
        first = next((k for k, call in enumerate(calls) if call.name not in self._hosted), len(calls))
        if cut or self.round >= self._most_rounds:
            first = 0
        self._run, self._returned = calls[:first], calls[first:]
        if not self._said.is_clients:
            # NOTE: neither side can run a call of a tool of this server whose arguments break off.
            self._returned = [
                call for call in self._returned if call.is_whole or call.name not in self._hosted
            ]
        if self._run:
            self.messages.append(self._said.message(self._run))
        return self._run

    def answer(self, call: Called, text: str) -> None:
        """The model reads `text` as the result of a call."""
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name})

    def advance(self) -> bool:
        """Begin the next round; false if the run has ended instead."""
        if not self._run or self._returned:
            return False
        self.round += 1
        self._said = _Said()
        return True

    def resume(self) -> None:
        """Begin the round behind calls that were `unanswered`."""
        self.round += 1

    def end(self) -> list[Event]:
        """The end of the run: calls of the client, the end of the choice, the sums. The conversation is complete."""
        said, returned = self._said, [replace(call, index=index) for index, call in enumerate(self._returned)]
        if self._run:
            # NOTE: the text stands beside the calls that have run.
            said = _Said()
        # NOTE: a call whose arguments break off is told, and is no part of the conversation.
        self.messages.append(said.message([call for call in returned if call.is_whole]))
        completed = [] if self._said.is_clients else [event for call in returned for event in call.events()]
        return [*completed, self._said.finished, _sum_of(self._ends)]


def _call_entry(call: Called) -> Message:
    """A call in the form of templates. Arguments that are no object stay text, and numbers that no message has."""
    arguments: Any = call.arguments
    with suppress(InvalidField):
        values = values_of(call.arguments, "arguments")
        if isinstance(values, dict):
            arguments, _ = arguments_of(values, "arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _called(index: int, entry: Message) -> Called:
    function = entry["function"]
    given = function["arguments"]
    arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
    return Called(0, index, entry.get("id", ""), function["name"], arguments)


def _with_note(messages: Sequence[Message], note: str) -> list[Message]:
    """`messages` with the note at their beginning: many templates take one system message, and only there."""
    if not note:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{note}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": note}, *messages]


def _sum_of(ends: Sequence[Ended]) -> Ended:
    return Ended(
        sum(each.prompt_tokens for each in ends),
        sum(each.completion_tokens for each in ends),
        sum(each.reasoning_tokens for each in ends),
        sum(each.cached_tokens for each in ends),
        sum(each.prompt_s for each in ends),
        sum(each.completion_s for each in ends),
    )


def spliced(stored: Sequence[Message], incoming: Sequence[Message]) -> list[Message]:
    """The incoming conversation with the turns of tools that the session has at the same places.

    1. Both are walked together. Turns of tools of the session are inserted, equal messages advance both.
    2. Incoming turns of tools that the session has, by the ids of their calls, are not repeated.
    3. The first difference stops: the rest of the request follows as it is.
    4. Turns of tools behind the last incoming message are kept.

    An answer of the assistant equals that of the session also where the client has joined the texts of all rounds.
    """
    joined: list[Message] = []
    seen: set[tuple[str, str]] = set()
    at, before = 0, ""
    for place, message in enumerate(incoming):
        while at < len(stored) and _is_of_tools(stored[at]) and not _is_same(stored[at], message):
            joined.append(stored[at])
            seen |= _ids(stored[at])
            before += (
                "".join(texts_of(stored[at].get("content"))) if stored[at]["role"] == "assistant" else ""
            )
            at += 1
        if (ids := _ids(message)) and ids <= seen:
            continue
        if at == len(stored) or not (
            _is_same(stored[at], message) or _is_joined(stored[at], message, before)
        ):
            return [*joined, *incoming[place:]]
        joined.append(stored[at])
        seen |= _ids(stored[at])
        at, before = at + 1, before if _is_of_tools(message) else ""
    while at < len(stored) and _is_of_tools(stored[at]):
        joined.append(stored[at])
        at += 1
    return joined


def _ids(message: Message) -> set[tuple[str, str]]:
    """What a turn of tools answers or asks for; empty for other messages, and where an id is missing."""
    if message["role"] == "tool":
        id_ = message.get("tool_call_id")
        return {("result", id_)} if id_ else set()
    ids = [entry.get("id") for entry in message.get("tool_calls", ())]
    return {("call", id_) for id_ in ids if id_} if all(ids) else set()


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _is_same(stored: Message, message: Message) -> bool:
    """Whether two messages say the same. Two calls or results with different ids differ; a missing id equals any."""
    if stored["role"] != message["role"] or _content(stored) != _content(message):
        return False
    if _functions(stored) != _functions(message):
        return False
    pairs = zip(_ids_by_place(stored), _ids_by_place(message), strict=True)
    return all(not (one and other) or one == other for one, other in pairs)


def _is_joined(stored: Message, message: Message, before: str) -> bool:
    """Whether a message of a client is the answer of the session behind the texts of the rounds before."""
    text = _content(stored)
    return bool(before) and isinstance(text, str) and _is_same({**stored, "content": before + text}, message)


def _content(message: Message) -> Content:
    return message.get("content") or ""


def _ids_by_place(message: Message) -> list[str | None]:
    """The id of the call that a result answers, then the ids of the calls of a turn."""
    return [message.get("tool_call_id"), *(entry.get("id") for entry in message.get("tool_calls", ()))]


def _functions(message: Message) -> list[Any]:
    return [entry["function"] for entry in message.get("tool_calls", ())]
