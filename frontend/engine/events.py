"""The neutral events of a stream of generated text, and its pace. Every protocol renders these events only.

    Started, Prompted if the request asks for its prompt, then for each choice any of Text, Reasoning and calls, then
    Finished; last Ended for the whole request

A call is CallBegun, any number of Arguments, and CallEnded; nothing else of its choice stands between.

A request with tools that run on the server has one choice. Each call of such a tool tells, between texts:

    Calling, Asked if somebody has to approve the call, Produced for each file, Completed

and before Finished comes one Session. A stream that fails raises a `PenstockError` in place of the next event.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import msgspec

from frontend.engine.answer import Answer
from frontend.records.finishing import TextMeter
from ipc.errors import DeadlineExceeded
from ipc.wire.streams import Finish, PromptToken, Start, TokenLogprob


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


class Text(msgspec.Struct, frozen=True):
    """Visible text of one choice: whole characters of `tokens` tokens. `logprobs` has one entry for each token.

    PERF: a struct is made in a ninth of the time of a frozen dataclass, and most tokens are an event of this kind.
    """

    choice: int
    text: str
    tokens: int = 1
    logprobs: list[TokenLogprob] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the reasoning of one choice, in the form of `Text`."""

    choice: int
    text: str
    tokens: int = 1
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call of one choice begins; `index` counts the calls of the choice.

    `logprobs` has one entry for each token of the call so far.
    """

    choice: int
    index: int
    id: str
    name: str
    logprobs: list[TokenLogprob] | None = None


class Arguments(msgspec.Struct, frozen=True):
    """A piece of the arguments of the call that has begun last. All pieces are compact JSON text."""

    choice: int
    text: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call that has begun last gets no more arguments. Without `is_whole` they break off, and are no JSON."""

    choice: int
    is_whole: bool = True
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call put together, see `CallBegun`. Without `is_whole` the arguments break off, and are no JSON.

    `logprobs` has one entry for each token of the call.
    """

    choice: int
    index: int
    id: str
    name: str
    arguments: str = ""
    logprobs: list[TokenLogprob] | None = None
    is_whole: bool = True

    def events(self) -> list[Event]:
        """The events of the call, with its arguments in one piece."""
        begun = CallBegun(self.choice, self.index, self.id, self.name, self.logprobs)
        pieces = [Arguments(self.choice, self.arguments)] if self.arguments else []
        return [begun, *pieces, CallEnded(self.choice, self.is_whole)]


@dataclass(slots=True)
class GrowingCall:
    """A tool call as its events come."""

    begun: CallBegun
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_whole: bool = False

    def __post_init__(self) -> None:
        self.logprobs += self.begun.logprobs or ()

    def take(self, event: Arguments | CallEnded) -> None:
        """More of the call."""
        self.logprobs += event.logprobs or ()
        if isinstance(event, Arguments):
            self.texts.append(event.text)
        else:
            self.is_whole = event.is_whole

    @property
    def called(self) -> Called:
        """The call so far."""
        begun, arguments = self.begun, "".join(self.texts)
        return Called(
            begun.choice, begun.index, begun.id, begun.name, arguments, self.logprobs or None, self.is_whole
        )


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


@dataclass(frozen=True, slots=True)
class Calling:
    """A tool of the server is about to run, or to be refused. `round` counts the turns of the model from 0.

    `arguments` is JSON text. `data` has `tool_type` (code_execution, shell, web_search or custom) and what the tool is
    given, as progress events tell both. `server` is the name of the tool's MCP server.
    """

    round: int
    id: str
    name: str
    arguments: str
    data: dict[str, Any]
    server: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """The run waits until somebody decides about the call. `tool` has source, kind and label.

    `arguments` is the JSON value of the call's arguments, or the text of arguments that are no JSON.
    """

    approval_id: str
    session_id: str
    round: int
    tool: dict[str, str]
    arguments: Any


@dataclass(frozen=True, slots=True)
class Produced:
    """A tool has made a file: the File object of the contract, without a body above 8 MiB."""

    file: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completed:
    """The call has ended. `data` is that of the progress event, `record` the entry of `agentic_tool_calls`.

    `status` is success, error, timeout, denied or failed. `sources` are the pages of a search, each with `url` and
    `title`, where the client is told of them.
    """

    round: int
    id: str
    name: str
    data: dict[str, Any]
    record: dict[str, Any]
    status: str = "success"
    sources: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Session:
    """The session in which the run keeps its messages, its files and its interpreter."""

    id: str


ToolEvent = Calling | Asked | Produced | Completed | Session
"""What a run with tools of the server adds to what an engine tells."""
CallEvent = CallBegun | Arguments | CallEnded
"""What tells a call."""
Event = Started | Prompted | Text | Reasoning | CallEvent | Finished | Ended | ToolEvent


class Mark(msgspec.Struct, frozen=True):
    """What another process needs to go on with a text behind the events that its reader has.

    `ids` are the token ids of each choice since the mark before, also those of text that is held back: uint32 in the
    byte order of the host. `seed` draws where the request has none. `weights` and `identity` name what writes, and no
    other model goes on. `deaths` of workers have cost the text a run. `pictures` is a hash of the pictures of the
    prompt, empty without any.
    """

    seed: int
    ids: list[bytes] = []
    weights: str = ""
    identity: str = ""
    deaths: int = 0
    pictures: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """A text that another process has begun: the events that its reader has, and the mark behind them with all ids.

    `moves` counts the processes that have lost the text.
    """

    events: list[Event]
    mark: Mark
    moves: int


class TextRelay(Protocol):
    """Who sends text on to another process."""

    @property
    def has_room(self) -> bool:
        """Whether the other process takes more."""

    def pass_on(
        self,
        kind: int,
        choice: int,
        text: str,
        tokens: int,
        ids: bytes | None,
        logprobs: list[TokenLogprob] | None,
        nbytes: int,
        finish: Finish | None = None,
    ) -> None:
        """An entry of the kind TEXT, REASONING or FINISHED of one choice; the last one has a `finish`.

        `ids` are those of the tokens of the choice since the mark before, as in `Mark`; None without marks. The text
        counts as taken, with `nbytes` (`nbytes_of`).
        """


class Generation(ABC):
    """One running request: an async iterator of lists of events, each with all that has arrived since the last list.

    The list with `Ended` is the last. The text of a list counts as taken by the client when the next list is asked for.
    `prompt_tokens` is there before `Started` where the prompt is tokenized while the request waits for the engine.
    """

    prompt_tokens: int | None = None

    @property
    def result(self) -> Answer | None:
        """The end of the answer, once the iteration has ended without an error, where the engine tells."""
        return None

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> list[Event]:
        """The next events. Raises the `PenstockError` of a stream that fails, once."""

    def mark(self) -> Mark | None:
        """Where the text stands; None if no other process could go on.

        Behind `__anext__` and before anything else is awaited, the mark fits the events so far.
        """
        return None

    def pass_to(self, relay: TextRelay) -> bool:
        """Text and ends that come while the reader waits shall go to `relay` in place of a list, while that has room.

        PERF: the reader sleeps through most tokens. Repeat the call behind each list: a run that follows a lost one
        begins with a list, whose mark tells what writes. False where the engine tells all in lists.
        """
        return False


class Pace:
    """The pace of one request for text, whatever engine runs the request: limits, times, tokens, sums.

    1. The first token has to come in time. Between two entries a reader waits a bounded time.
    2. The engine tells of all that arrives, also while nobody reads, so the counted times and tokens are true.
    3. An engine that runs a request again calls `begin` before the second run. Before a run that goes on with a text
       the engine calls `go_on`, and nothing is counted twice.

    All instants are CLOCK_MONOTONIC nanoseconds of this process.
    """

    def __init__(self, began_ns: int, first_by_ns: int, idle_s: float, meter: TextMeter) -> None:
        """The request came at `began_ns`, and its first token has to come until `first_by_ns`.

        A reader waits at most `idle_s` seconds between two entries.
        """
        self._began_ns, self.first_by_ns, self._idle_s, self._meter = began_ns, first_by_ns, idle_s, meter
        self.begin()

    def begin(self) -> None:
        """A run begins: nothing has arrived."""
        self._start = Start(0)
        self._late_ns = 0
        self._finishes: list[Finish] = []
        self._tokens: defaultdict[int, int] = defaultdict(int)
        self._arrivals_ns: dict[int, int] = {}
        self._first_ns = self._last_ns = 0

    def go_on(self, now_ns: int) -> None:
        """A run begins that goes on with the text. Its first token has as long as that of the request had."""
        self._late_ns = now_ns + self.first_by_ns - self._began_ns

    def take_up(self, past: Past, now_ns: int) -> None:
        """The text was begun by another process, which has counted what it had."""
        self._first_ns = self._last_ns = now_ns
        self._tokens.update({choice: len(ids) // 4 for choice, ids in enumerate(past.mark.ids)})
        for event in past.events:
            if isinstance(event, Started):
                self._start = Start(event.prompt_tokens, event.cached_tokens)
            elif isinstance(event, Finished):
                finish = Finish(event.reason, event.stop, event.tokens, event.reasoning_tokens)
                self._finishes.append(finish)

    def started(self, start: Start) -> None:
        """The engine has begun with the prompt."""
        self._start = start

    def heard(self, now_ns: int) -> None:
        """A piece of the prompt has arrived."""
        self._last_ns = now_ns

    def held(self, now_ns: int) -> None:
        """Tokens were computed whose text waits."""
        if not self._first_ns:
            self._note_first(now_ns)
        self._last_ns, self._late_ns = now_ns, 0

    def step(self, choice: int, tokens: int, now_ns: int) -> None:
        """A step has added `tokens` to a choice."""
        before_ns = self._arrivals_ns.get(choice)
        if not self._first_ns:
            self._note_first(now_ns)
        # NOTE: entries of one step arrive together.
        if before_ns is not None and before_ns != now_ns:
            self._meter.between.observe((now_ns - before_ns) / 1e9)
        self._arrivals_ns[choice] = self._last_ns = now_ns
        self._late_ns = 0
        if tokens:
            self._tokens[choice] += tokens
            self._meter.generated.inc(tokens)

    def _note_first(self, now_ns: int) -> None:
        """The first tokens have come."""
        self._first_ns = now_ns
        self._meter.first.observe((now_ns - self._began_ns) / 1e9)
        self._meter.prompt.inc(self._start.prompt_tokens)
        self._meter.cached.inc(self._start.cached_tokens)

    def finished(self, choice: int, finish: Finish, now_ns: int) -> None:
        """A choice has ended; its tokens without text, such as an end token, are known now."""
        self.step(choice, max(0, finish.tokens - self._tokens[choice]), now_ns)
        self._meter.ended[finish.reason].inc()
        self._finishes.append(finish)

    def ended(self) -> Ended:
        """The end of the request, with the sums of all choices."""
        first_ns = self._first_ns or time.monotonic_ns()
        return Ended(
            self._start.prompt_tokens,
            sum(each.tokens for each in self._finishes),
            sum(each.reasoning_tokens for each in self._finishes),
            self._start.cached_tokens,
            (first_ns - self._began_ns) / 1e9,
            max(0, self._last_ns - first_ns) / 1e9,
        )

    def lateness(self, now_ns: int, waits_since_ns: int) -> DeadlineExceeded | None:
        """The error if the text is late, else None. A reader waits since `waits_since_ns`; 0 if no reader waits."""
        if not self._last_ns:
            if now_ns >= self.first_by_ns:
                return DeadlineExceeded("the deadline passed before the first token", retry_after_s=1)
            return None
        if self._late_ns:
            if now_ns >= self._late_ns:
                return DeadlineExceeded("no worker went on with the text in time", retry_after_s=1)
            return None
        # NOTE: a worker sends nothing while the client has enough, so only the time of a waiting reader counts.
        if waits_since_ns and (now_ns - max(self._last_ns, waits_since_ns)) / 1e9 >= self._idle_s:
            return DeadlineExceeded(
                f"no token came for {self._idle_s:g} s (generation.idle_timeout_s)", retry_after_s=1
            )
        return None
