"""Streamed results: structs of parts and of generated text that come before the final result, and their flow control.

Parts come like this:

1. A request with `Work.parts` above 0 is answered with any number of `Part`s and then a `Result` or a `Failure`.
2. The frontend says with `PartsConsumed` how many parts its client has had. The worker makes at most `Work.parts` more
   than that, and nothing ahead of a part in a block: a client that does not read holds one block at most.

Generated text comes like this:

1. A `Work` with a `GenerateCall` is answered with entries of `Deltas`, then with a `Result` or a `Failure`.
2. A worker sends each session one `Deltas` a step. The message has what is new for all streams of the session.
3. For a `Submit` with `written` some entries bring the ids of all tokens of their choice since the entry before that
   brought ids. The ids of a step and the text of the step are in one message, so that a frontend has both or neither.
4. The frontend says with `DeltasTaken` how many bytes (`nbytes_of`) its clients have taken. A worker pauses a stream
   with more than `WINDOW_NBYTES` that are not taken, and never holds up another stream.

Every stream of text begins with an entry QUEUED, then STARTED; a stream that only counts its prompt has STARTED alone.
Entries PROMPT, which belong to all choices, come before those of any choice. Each choice ends with one entry FINISHED.
Entries of one choice are in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ipc.wire.messages import Result, Wire

WINDOW = 8
"""Parts that a frontend asks to be sent ahead."""
MAX_WINDOW = 64
STARTED, TEXT, REASONING, CALLED, FINISHED, HELD, QUEUED, PROMPT, ARGUMENTS, CALL_ENDED, CALL_CUT = range(11)
"""Kinds of entries: the engine has begun; visible text; text of reasoning; a tool call begins; a choice has ended;
a choice goes on with tokens whose text waits, as the text may become a tool call or a stop string; the prompt is
tokenized, and the request waits for the engine; a piece of the prompt; a piece of the arguments of the call that began
last; that call has all of its arguments; that call ends without the rest of its arguments."""
WINDOW_NBYTES = 64 << 10
"""Bytes that a worker sends ahead of the client of one stream."""
LOGPROB_NBYTES = 16
"""Bytes of each log probability on top of its text, about what a message takes for one."""
MOST_LEVELS = 48
"""Levels of lists and objects in the arguments of a call, in requests and in answers: clients send answers back.

Schemas and results of functions have the same limit. Chat templates bound a whole conversation by some more."""
FINISH_REASONS = ("stop", "length", "tool_calls", "canceled")


class Part(Wire, frozen=True, tag="part"):
    """One part of the answer to the request `result.id`, which goes on. Its tensors lie as in any result."""

    result: Result


class PartsConsumed(Wire, frozen=True, tag="parts_consumed"):
    """The oldest `count` parts of request `id` that were not taken yet are taken."""

    id: int
    count: int


class Flow:
    """What either side knows of one stream: how much was sent, and how much of that the client has taken.

    The unit is a part of an answer, or a byte of text (`nbytes_of`). At most one thread calls `sent`, and one `taken`;
    a thread that acts on both locks.
    """

    __slots__ = ("_alone", "_sent", "_taken", "_window")

    def __init__(self, window: int) -> None:
        """Nothing more may be sent once `window` or more is not taken."""
        self._window = window
        self._sent = self._taken = 0
        self._alone = False

    @property
    def ahead(self) -> int:
        """What was sent and is not taken."""
        return self._sent - self._taken

    @property
    def open(self) -> bool:
        """Whether more may be sent."""
        ahead = self._sent - self._taken
        return ahead < self._window and not (self._alone and ahead)

    @property
    def half_open(self) -> bool:
        """Whether half of the window is free again, after which a stream that was paused goes on."""
        return self.ahead <= self._window // 2

    def sent(self, amount: int, alone: bool = False) -> None:
        """More was sent. With `alone` nothing may be sent until the client has taken everything."""
        self._sent += amount
        self._alone = alone

    def taken(self, amount: int) -> None:
        """The client has taken more. An amount beyond what was sent is cut."""
        self._taken += min(max(amount, 0), self.ahead)


def part_flow(window: int) -> Flow:
    """The flow of an answer in parts: the frontend asks for `window` parts, at most `MAX_WINDOW` are granted.

    A part in a block goes `alone`.
    """
    return Flow(max(1, min(window, MAX_WINDOW)))


class TokenLogprob(Wire, frozen=True):
    """One chosen token: its id, its bytes, its natural log probability, and the likeliest tokens in the same form.

    `is_silent`: the text of the answer has nothing of the token, such as an end token.
    """

    id: int
    raw: bytes
    logprob: float
    top: list[tuple[int, bytes, float]] = msgspec.field(default_factory=list)
    is_silent: bool = False


class PromptToken(Wire, frozen=True):
    """One token of a prompt, in the form of `TokenLogprob`.

    The first token has no log probability. `start` is the place of the token in the text of the prompt, in characters.
    Tokens of one character have one place, and tokens that the text does not show have no width.
    """

    id: int
    raw: bytes
    start: int
    logprob: float | None = None
    top: list[tuple[int, bytes, float]] = msgspec.field(default_factory=list)


def nbytes_of(text: str, logprobs: Sequence[TokenLogprob | PromptToken] | None) -> int:
    """What an entry of text counts for `WINDOW_NBYTES`: its UTF-8, and all of its log probabilities."""
    nbytes = len(text) if text.isascii() else len(text.encode())
    if logprobs:
        nbytes += LOGPROB_NBYTES * sum(1 + len(each.top) for each in logprobs)
    return nbytes


class CalledFunction(Wire, frozen=True):
    """A tool call that begins: the name, and the beginning of ids of such calls.

    Entries ARGUMENTS of the choice follow, whose texts add up to compact JSON, then CALL_ENDED or CALL_CUT.
    """

    name: str
    prefix: str = "call-"


class Start(Wire, frozen=True):
    """The prompt in tokens, and how many of them were found in the prefix cache.

    `weights`, of QUEUED only, stand for the model and the LoRA adapter that write; empty where the worker cannot tell.
    `waited_ns`, of STARTED only, is how long the prompt waited for its first step, without the time of its pictures.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    weights: str = ""
    waited_ns: int = 0


class Finish(Wire, frozen=True):
    """The end of a choice: one of `FINISH_REASONS`, the text of `stop` that matched, and tokens of the choice."""

    reason: str
    stop: str | None = None
    tokens: int = 0
    reasoning_tokens: int = 0


class Deltas(Wire, frozen=True, tag="deltas"):
    """What one step added to the streams of a session, in columns: entry `k` is the k-th value of each list.

    ids      request of the entry
    choices  number of the choice, from 0
    kinds    STARTED, TEXT, REASONING, CALLED, FINISHED, HELD, QUEUED, PROMPT, ARGUMENTS, CALL_ENDED or CALL_CUT
    texts    text of TEXT, REASONING, PROMPT and ARGUMENTS, else empty
    tokens   how many tokens the entry stands for
    written  ids of tokens, in the form of `Written.choices`; no list where no entry has any
    The maps hold, by number of the entry, what few entries have.
    """

    ids: list[int]
    choices: list[int]
    kinds: list[int]
    texts: list[str]
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprob]] = msgspec.field(default_factory=dict)
    calls: dict[int, CalledFunction] = msgspec.field(default_factory=dict)
    starts: dict[int, Start] = msgspec.field(default_factory=dict)
    finishes: dict[int, Finish] = msgspec.field(default_factory=dict)
    prompts: dict[int, list[PromptToken]] = msgspec.field(default_factory=dict)
    written: list[bytes] = msgspec.field(default_factory=list)


class DeltasTaken(Wire, frozen=True, tag="deltas_taken"):
    """Clients have taken so many bytes (`nbytes_of`) of these requests."""

    ids: list[int]
    nbytes: list[int]
