"""What a request has generated, gathered from its events, for answers that are sent whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from frontend.engine.events import (
    Called,
    Ended,
    Event,
    Finished,
    Generation,
    Prompted,
    Reasoning,
    Started,
    Text,
)
from ipc.wire.streams import PromptToken, TokenLogprob


@dataclass(slots=True)
class ChoiceOutcome:
    """One choice: its texts in pieces, its calls, and how it ended (None while it goes on).

    The first choice of a prompt has what is told of the prompt.
    """

    prompt_texts: list[str] = field(default_factory=list)
    prompt_tokens: list[PromptToken] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def text(self) -> str:
        """All visible text."""
        return "".join(self.texts)

    @property
    def reasoning_text(self) -> str:
        """All text of the reasoning."""
        return "".join(self.reasoning)

    @property
    def reason(self) -> str:
        """Why it ended; a choice that was cut off counts as canceled."""
        return finish_reason(self.finished, bool(self.calls)) if self.finished else "canceled"


def finish_reason(finished: Finished, has_calls: bool) -> str:
    """The reason of an end for clients: a choice with calls that ended by itself ended for its calls."""
    return "tool_calls" if has_calls and finished.reason == "stop" else finished.reason


class Outcome:
    """All choices of a request, by number, and its counts once it has ended."""

    def __init__(self, choices: int) -> None:
        self.choices = [ChoiceOutcome() for _ in range(choices)]
        self.started: Started | None = None
        self.ended: Ended | None = None

    async def gather(self, generation: Generation) -> None:
        """Take all events. Raises the error of a stream that fails; what came before stays."""
        async for events in generation:
            self.take(events)

    def take(self, events: Iterable[Event]) -> None:
        """Take events in their order."""
        for event in events:
            if isinstance(event, Text | Reasoning | Called | Finished):
                self.choices[event.choice].logprobs += event.logprobs or ()
            if isinstance(event, Text | Reasoning):
                choice = self.choices[event.choice]
                (choice.texts if isinstance(event, Text) else choice.reasoning).append(event.text)
            elif isinstance(event, Prompted):
                self.choices[event.choice].prompt_texts.append(event.text)
                self.choices[event.choice].prompt_tokens += event.tokens
            elif isinstance(event, Called):
                self.choices[event.choice].calls.append(event)
            elif isinstance(event, Finished):
                self.choices[event.choice].finished = event
            elif isinstance(event, Ended):
                self.ended = event
            else:
                self.started = event

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been generated."""
        return not any(each.texts or each.reasoning or each.calls for each in self.choices)

    @property
    def counts(self) -> Ended:
        """The counts of the request; of a request that was cut off what is known."""
        if self.ended is not None:
            return self.ended
        prompt, cached = (self.started.prompt_tokens, self.started.cached_tokens) if self.started else (0, 0)
        return Ended(prompt, sum(c.finished.tokens for c in self.choices if c.finished), cached_tokens=cached)
