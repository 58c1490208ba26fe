"""What goes into the engine and what comes out: one prepared request, and what a step adds to a choice."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from ipc.wire.messages import GenerateCall, TextTiming, Written
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_ENDED,
    CALLED,
    HELD,
    REASONING,
    TEXT,
    CalledFunction,
    Deltas,
    Finish,
    PromptToken,
    Start,
    TokenLogprob,
)
from workers.generation.pictures.family import Picture

Maps = tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]
"""The maps of `Deltas`, by number of the entry."""
_NO_MAPS: Maps = ({}, {}, {}, {}, {})
_PLAIN_KINDS = frozenset((TEXT, REASONING, ARGUMENTS, HELD))
"""Kinds of entries that have nothing in the maps of `Deltas` but log probabilities."""


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A stretch of output: TEXT, REASONING, CALLED, ARGUMENTS, CALL_ENDED or CALL_CUT of `ipc.wire.streams`.

    `call` is there for CALLED only. `tokens` is the number of tokens that the segment stands for.
    """

    kind: int
    text: str = ""
    call: CalledFunction | None = None
    tokens: int = 0


class Call(NamedTuple):
    """A whole tool call: the name, the arguments as compact JSON text, and the beginning of ids of such calls."""

    name: str
    arguments: str
    prefix: str = "call-"

    def segments(self) -> list[Segment]:
        """The call, with its arguments in one piece."""
        begun = Segment(CALLED, call=CalledFunction(self.name, self.prefix))
        return [begun, Segment(ARGUMENTS, self.arguments), Segment(CALL_ENDED)]


class OutputParser(Protocol):
    """Tells reasoning and tool calls from visible text in the output of one choice, piece by piece.

    Text that may become a tool call is held back, and given as text if it does not become one. The parser never raises:
    what cannot be parsed is visible text.
    """

    def feed(self, text: str, tokens: int, has_mark: bool = False) -> list[Segment]:
        """More text of the choice, whole characters, which `tokens` tokens stand for.

        `has_mark`: one of these is a token of the tokenizer that is a mark. Other tokens can have the same letters.
        """

    def finish(self, cut: bool) -> list[Segment]:
        """The choice has ended, with its last allowed token (`cut`) or otherwise: what was held back."""


class Matcher(Protocol):
    """The state of a grammar in one choice. A matcher is used by one thread at a time."""

    def consume(self, token: int) -> bool:
        """Take a chosen token; false if the grammar forbids the token."""

    def forced(self) -> list[int]:
        """The tokens that must come next, if the grammar leaves no choice."""


class PromptText(NamedTuple):
    """The text of a prompt, the place of each token in characters, and what gives the bytes of a token."""

    text: str
    starts: Sequence[int]
    raw_of: Callable[[int], bytes]

    def between(self, first: int, stop: int) -> str:
        """The text of the tokens `first` to `stop`; a character of several tokens belongs to the last of them."""
        start = self.starts[first] if first else 0
        return self.text[start : self.starts[stop] if stop < len(self.starts) else None]


class Numbered(Protocol):
    """What a sequence knows of its LoRA adapter."""

    @property
    def serial(self) -> int:
        """A number above 0 that no other adapter of this process has."""


@dataclass(slots=True, eq=False)
class Phases:
    """What one request waits for, in the thread of its engine.

    `decode_ns` is the time in which its pictures were decoded before. Instants are CLOCK_MONOTONIC nanoseconds; 0: not
    yet.
    """

    decode_ns: int = 0
    _arrived_ns: int = 0
    _begun_ns: int = 0
    _first_ns: int = 0
    _asked_ns: int = 0
    _see_ns: int = 0
    _seen_before_ns: int = 0
    """The part of `_see_ns` before the first step."""

    def arrived(self) -> None:
        """The request is in the engine."""
        self._arrived_ns = time.monotonic_ns()

    def asks(self) -> None:
        """The features of some picture are lacking. Idempotent."""
        self._asked_ns = self._asked_ns or time.monotonic_ns()

    def sees(self) -> None:
        """No features are lacking, or none are wanted any more. Idempotent."""
        if self._asked_ns:
            self._see_ns += time.monotonic_ns() - self._asked_ns
            self._asked_ns = 0

    def stepped(self) -> None:
        """A step computes a part of the prompt, or writes; the first time counts."""
        if not self._begun_ns:
            self._begun_ns, self._seen_before_ns = time.monotonic_ns(), self._see_ns

    def wrote(self) -> None:
        """A token was chosen; the first time counts."""
        self._first_ns = self._first_ns or time.monotonic_ns()

    @property
    def waited_ns(self) -> int:
        """How long the prompt waited for its first step, without the time of its pictures."""
        return max(0, self._begun_ns - self._arrived_ns - self._seen_before_ns) if self._begun_ns else 0

    def timing(self, ended_ns: int) -> TextTiming | None:
        """The phases of a text that has ended; None for a text without a token."""
        if not self._first_ns:
            return None
        seen_later_ns = self._see_ns - self._seen_before_ns
        prefill_ns = max(0, self._first_ns - self._begun_ns - seen_later_ns)
        return TextTiming(self.decode_ns, self._see_ns, prefill_ns, max(0, ended_ns - self._first_ns))


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """One request, prepared for the engine on a preparing thread.

    `key` names the request in `Emission`s. `prompt` are token ids, at least one. `max_tokens` is resolved against the
    context and counts each choice alone. `stop_ids` are the ids that end a choice, end tokens of the model included
    unless the request ignores them. `make_matcher` and `make_parser` give each choice a state of its own; without a
    parser all text is visible. `prompt_text` is there for a request that wants to be told its prompt. `written` is
    there for a text that another worker may carry on, and is what earlier workers have written. The engine sets `lora`,
    the LoRA adapter that the call names. `pictures` stand in the prompt in this order. `phases` are its times.
    """

    key: Hashable
    prompt: list[int]
    call: GenerateCall
    max_tokens: int
    stop_ids: frozenset[int]
    make_parser: Callable[[], OutputParser] | None = None
    make_matcher: Callable[[], Matcher] | None = None
    prompt_text: PromptText | None = None
    written: Written | None = None
    lora: Numbered | None = None
    pictures: list[Picture] = field(default_factory=list)
    phases: Phases = field(default_factory=Phases)

    @property
    def is_carried_on(self) -> bool:
        """Whether earlier workers have told the beginning of the answer."""
        return self.written is not None and self.written.has_begun

    def written_of(self, choice: int) -> array[int]:
        """Ids of the tokens of a choice that earlier workers have written."""
        choices = self.written.choices if self.written is not None else []
        return array("I", choices[choice]) if choices else array("I")

    def has_ended(self, choice: int) -> bool:
        """Whether an earlier worker has told the end of a choice."""
        return self.written is not None and bool(self.written.ended) and self.written.ended[choice]


class Emission(msgspec.Struct):
    """What a step adds to one choice of one request: one entry of `ipc.wire.streams.Deltas`.

    PERF: a struct is made in a third of the time of a tuple with names, and there is one for each token.
    """

    key: Hashable
    choice: int
    kind: int
    text: str = ""
    tokens: int = 0
    logprobs: Sequence[TokenLogprob] | None = None
    call: CalledFunction | None = None
    start: Start | None = None
    finish: Finish | None = None
    prompt: Sequence[PromptToken] | None = None
    written: bytes = b""


def deltas_of(ids: list[int], entries: Sequence[Emission]) -> Deltas:
    """One message with entries of one session, whose requests are `ids`."""
    # PERF: most messages have few entries, and one loop costs less than one for each column.
    choices, kinds, texts, tokens, written = [], [], [], [], []
    rare: list[tuple[int, Emission]] = []
    for at, each in enumerate(entries):
        choices.append(each.choice)
        kinds.append(each.kind)
        texts.append(each.text)
        tokens.append(each.tokens)
        written.append(each.written)
        if each.logprobs or each.kind not in _PLAIN_KINDS:
            rare.append((at, each))
    maps = _maps_of(rare) if rare else _NO_MAPS
    return Deltas(ids, choices, kinds, texts, tokens, *maps, written if any(written) else [])


def _maps_of(rare: Sequence[tuple[int, Emission]]) -> Maps:
    """What the entries have that are not plain text, by their numbers."""
    return (
        {at: list(each.logprobs) for at, each in rare if each.logprobs},
        {at: each.call for at, each in rare if each.call is not None},
        {at: each.start for at, each in rare if each.start is not None},
        {at: each.finish for at, each in rare if each.finish is not None},
        {at: list(each.prompt) for at, each in rare if each.prompt},
    )
