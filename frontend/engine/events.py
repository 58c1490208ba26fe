"""The neutral events of a stream of generated text. Every protocol renders these, and nothing else.

    Started, Prompted if the request asks for its prompt, then for each choice any of Text, Reasoning and Called, then
    Finished; last Ended for the whole request

A stream that fails raises a `PenstockError` in place of the next event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from ipc.wire.streams import PromptToken, TokenLogprob


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has begun with a prompt of so many tokens; `cached_tokens` of them need not be computed."""

    prompt_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prompted:
    """A piece of the prompt of the choices from `choice` on: the text from character `start`, and tokens from `first`.

    `tokens` are those of the piece, for a request that asks for log probabilities of its prompt.
    """

    choice: int
    text: str
    tokens: list[PromptToken]
    start: int = 0
    first: int = 0

    def behind(self, characters: int, tokens: int) -> Prompted:
        """What the piece adds for a reader who has so many characters and tokens of the prompt."""
        start, first = max(self.start, characters), max(self.first, tokens)
        text, rest = self.text[start - self.start :], self.tokens[first - self.first :]
        return Prompted(self.choice, text, rest, start, first)


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text of one choice: whole characters of `tokens` tokens. `logprobs` has one entry for each token."""

    choice: int
    text: str
    tokens: int = 1
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning of one choice, in the form of `Text`."""

    choice: int
    text: str
    tokens: int = 1
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A whole tool call of one choice; `index` counts the calls of the choice, `arguments` is compact JSON text.

    `logprobs` has one entry for each token of the call.
    """

    choice: int
    index: int
    id: str
    name: str
    arguments: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice has ended: `reason` is one of `ipc.wire.streams.FINISH_REASONS`, `stop` the text that ended it.

    `logprobs` has one entry for each token behind the last event of the choice, such as an end token.
    """

    choice: int
    reason: str
    stop: str | None = None
    tokens: int = 0
    reasoning_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """All choices have ended. Token counts are sums over the choices.

    `prompt_s` is the time from the start of the request to its first token, `completion_s` from there to the end.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    completion_s: float = 0.0


Event = Started | Prompted | Text | Reasoning | Called | Finished | Ended


class Generation(ABC):
    """One running request: an async iterator of lists of events, each with all that has arrived since the last list.

    The list with `Ended` is the last. The text of a list counts as taken by the client when the next list is asked for.
    `prompt_tokens` is there before `Started` where the prompt is tokenized while the request waits for the engine.
    """

    prompt_tokens: int | None = None

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> list[Event]:
        """The next events. Raises the `PenstockError` of a stream that fails, once."""
