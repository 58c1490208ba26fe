"""Generated text as a whole (`Outcome`), log probabilities (`entries_of`), several texts as one (`Together`).

`Outcome` gathers the events of a request for an answer that is sent whole. `entries_of` writes log probabilities in the
form of OpenAI, which chat, Responses and Messages share. `Together` runs a request with several prompts:

1. Each generation is read by a task of its own, which waits until its events have been taken.
2. Choices are numbered through: those of the second prompt follow those of the first.
3. Token counts are summed, and `Started` and `Ended` are told once. The first error ends all of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import msgspec

from frontend.engine.events import (
    Arguments,
    CallBegun,
    Called,
    CallEnded,
    CallEvent,
    Calling,
    Completed,
    Ended,
    Event,
    Finished,
    Generation,
    GrowingCall,
    Produced,
    Prompted,
    Reasoning,
    Session,
    Started,
    Text,
    ToolEvent,
)
from ipc.wire.streams import PromptToken, TokenLogprob

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|true|false|null|-?[0-9](?:[0-9.eE+-]*[0-9])?|.', re.DOTALL)
"""A whole string, a mark, another value of compact JSON, or the beginning of something that breaks off."""
_MARKS = frozenset("{}[]:,")
_OF_CHOICES = (Text, Reasoning, CallBegun, Arguments, CallEnded, Finished)
"""PERF: a tuple, since each event is asked and a union of types would be made anew each time."""
LEAST = -9999.0
"""What stands for a probability of zero, whose logarithm JSON cannot express."""


def entries_of(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """`[{"token", "logprob", "bytes", "token_id", "top_logprobs"}]`: text, natural logarithm, bytes as integers.

    `bytes` are those of the answer: a token of which the answer has nothing has none.
    """
    return [_told(token) for token in tokens]


def _told(token: TokenLogprob) -> dict[str, Any]:
    entry = _entry(token.id, token.raw, token.logprob)
    if token.is_silent:
        entry["bytes"] = []
    return {**entry, "top_logprobs": [_entry(*each) for each in token.top]}


def text_of_token(raw: bytes) -> str:
    """The text of a token, which may end inside of a character."""
    return raw.decode(errors="replace")


def finite(logprob: float) -> float:
    """`logprob` as JSON can express it."""
    return max(logprob, LEAST)


def _entry(token: int, raw: bytes, logprob: float) -> dict[str, Any]:
    text = text_of_token(raw)
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw), "token_id": token}


@dataclass(slots=True)
class Spoken:
    """A stretch of visible text or of reasoning, in pieces."""

    kind: type[Text | Reasoning]
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole stretch."""
        return "".join(self.texts)


@dataclass(slots=True)
class ChoiceOutcome:
    """One choice: its parts in the order in which they were written, and how it ended (None while it goes on).

    The first choice of a prompt has what is told of the prompt.
    """

    prompt_texts: list[str] = field(default_factory=list)
    prompt_tokens: list[PromptToken] = field(default_factory=list)
    parts: list[Spoken | GrowingCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    def take(self, event: Text | Reasoning | CallEvent) -> None:
        """More of the choice."""
        last = self.parts[-1] if self.parts else None
        if isinstance(event, (Text, Reasoning)):
            kind = type(event)
            if not isinstance(last, Spoken) or last.kind is not kind:
                self.parts.append(last := Spoken(kind))
            last.texts.append(event.text)
        elif isinstance(event, CallBegun):
            self.parts.append(GrowingCall(event))
        else:
            assert isinstance(last, GrowingCall)
            last.take(event)

    @property
    def text(self) -> str:
        """All visible text."""
        return self._spoken(Text)

    @property
    def reasoning_text(self) -> str:
        """All text of the reasoning."""
        return self._spoken(Reasoning)

    def _spoken(self, kind: type[Text | Reasoning]) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Spoken) and part.kind is kind])

    @property
    def calls(self) -> list[Called]:
        """All calls, the last of which may lack a part of its arguments."""
        return [part.called for part in self.parts if isinstance(part, GrowingCall)]

    @property
    def reason(self) -> str:
        """Why it ended; a choice that was cut off counts as canceled."""
        has_calls = any(isinstance(part, GrowingCall) for part in self.parts)
        return finish_reason(self.finished, has_calls) if self.finished else "canceled"


def object_of(call: Called) -> str:
    """The arguments of a call as the JSON text of an object; of arguments that break off, the members that are whole.

    Arguments of a worker are compact JSON, or a beginning of that.
    """
    if call.is_whole:
        return call.arguments
    end, closing, ends = 0, "", ""
    is_key = False
    for part in _PART.finditer(call.arguments):
        letter = part[0][0]
        if len(part[0]) == 1 and letter not in _MARKS and not letter.isdigit():
            break
        if letter in "{[":
            closing = ("}" if letter == "{" else "]") + closing
        elif letter in "}]":
            closing = closing[1:]
        if letter == "," or letter == ":":
            is_key = letter == "," and closing[:1] == "}"
            continue
        if not is_key:
            end, ends = part.end(), closing
        is_key = letter == "{"
    return call.arguments[:end] + ends or "{}"


def finish_reason(finished: Finished, has_calls: bool) -> str:
    """The reason of an end for clients: a choice with calls that ended by itself ended for its calls."""
    return "tool_calls" if has_calls and finished.reason == "stop" else finished.reason


class Outcome:
    """All choices of a request, by number, and its counts once it has ended.

    Of a run with tools of the server the choice is that of the last round. `completed` are its calls in their order,
    `files` what they made, `session_id` is empty without such a run.
    """

    def __init__(self, choices: int) -> None:
        self.choices = [ChoiceOutcome() for _ in range(choices)]
        self.started: Started | None = None
        self.ended: Ended | None = None
        self.completed: list[Completed] = []
        self.files: list[dict[str, Any]] = []
        self.session_id = ""

    async def gather(self, generation: Generation) -> None:
        """Take all events. Raises the error of a stream that fails; what came before stays."""
        async for events in generation:
            self.take(events)

    def take(self, events: Iterable[Event]) -> None:
        """Take events in their order."""
        for event in events:
            if isinstance(event, _OF_CHOICES):
                choice = self.choices[event.choice]
                choice.logprobs += event.logprobs or ()
                if isinstance(event, Finished):
                    choice.finished = event
                else:
                    choice.take(event)
            elif isinstance(event, Prompted):
                self.choices[event.choice].prompt_texts.append(event.text)
                self.choices[event.choice].prompt_tokens += event.tokens
            elif isinstance(event, Ended):
                self.ended = event
            elif isinstance(event, Started):
                self.started = event
            else:
                self._take_step(event)

    def _take_step(self, event: ToolEvent) -> None:
        if isinstance(event, Calling):
            self.choices = [ChoiceOutcome()]
        elif isinstance(event, Completed):
            self.completed.append(event)
        elif isinstance(event, Produced):
            self.files.append(event.file)
        elif isinstance(event, Session):
            self.session_id = event.id

    @property
    def records(self) -> list[dict[str, Any]]:
        """The entries of `agentic_tool_calls`."""
        return [event.record for event in self.completed]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been generated."""
        return not any(each.parts for each in self.choices)

    @property
    def counts(self) -> Ended:
        """The counts of the request; of a request that was cut off what is known."""
        if self.ended is not None:
            return self.ended
        prompt, cached = (self.started.prompt_tokens, self.started.cached_tokens) if self.started else (0, 0)
        return Ended(prompt, sum(c.finished.tokens for c in self.choices if c.finished), cached_tokens=cached)


class Together(Generation):
    """An async context over `generations`, each with `choices` choices."""

    def __init__(self, generations: Sequence[Generation], choices: int) -> None:
        self._generations, self._choices = generations, choices
        self._queue: asyncio.Queue[list[Event] | BaseException] = asyncio.Queue(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._starts: list[Started] = []
        self._ends: list[Ended] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.ensure_future(self._read(generation, number * self._choices))
            for number, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __anext__(self) -> list[Event]:
        if len(self._ends) == len(self._generations):
            raise StopAsyncIteration
        while True:
            taken = await self._queue.get()
            if isinstance(taken, BaseException):
                raise taken
            if events := self._merged(taken):
                return events

    async def _read(self, generation: Generation, first: int) -> None:
        try:
            async for events in generation:
                await self._queue.put([_renumbered(event, first) for event in events])
        except Exception as error:
            await self._queue.put(error)

    def _merged(self, events: list[Event]) -> list[Event]:
        """`events` without what is told once for all; that is added when it is complete."""
        merged: list[Event] = []
        for event in events:
            if isinstance(event, Started):
                self._starts.append(event)
                if len(self._starts) == len(self._generations):
                    merged.append(_sum_of_starts(self._starts))
            elif isinstance(event, Ended):
                self._ends.append(event)
                if len(self._ends) == len(self._generations):
                    merged.append(_sum_of_ends(self._ends))
            else:
                merged.append(event)
        return merged


async def entered(stack: AsyncExitStack, generations: Sequence[Generation], choices: int) -> Generation:
    """One generation for all of `generations`; `stack` ends what joins them."""
    if len(generations) == 1:
        return generations[0]
    return await stack.enter_async_context(Together(generations, choices))


def _renumbered(event: Event, first: int) -> Event:
    if isinstance(event, Started | Ended | ToolEvent):
        return event
    choice = event.choice + first
    if isinstance(event, msgspec.Struct):
        return msgspec.structs.replace(event, choice=choice)
    return replace(event, choice=choice)


def _sum_of_starts(starts: Sequence[Started]) -> Started:
    return Started(sum(each.prompt_tokens for each in starts), sum(each.cached_tokens for each in starts))


def _sum_of_ends(ends: Sequence[Ended]) -> Ended:
    """Sums of tokens; the times are those of the longest, since the generations run side by side."""
    return Ended(
        sum(each.prompt_tokens for each in ends),
        sum(each.completion_tokens for each in ends),
        sum(each.reasoning_tokens for each in ends),
        sum(each.cached_tokens for each in ends),
        max(each.prompt_s for each in ends),
        max(each.completion_s for each in ends),
    )
