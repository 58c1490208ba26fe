"""Streams of generated text: structs of what each step adds, and their flow control.

1. A `Work` with a `GenerateCall` is answered with entries of `Deltas`, then with a `Result` or a `Failure`.
2. A worker sends each session one `Deltas` a step. The message has what is new for all streams of the session.
3. The frontend says with `DeltasTaken` how many bytes (`nbytes_of`) its clients have taken. A worker pauses a stream
   with more than `WINDOW_NBYTES` that are not taken, and never holds up another stream.

Every stream begins with an entry QUEUED, then STARTED; one that only counts its prompt has STARTED alone. Entries
PROMPT, which belong to all choices, come before those of any choice. Each choice ends with one entry FINISHED. Entries
of one choice are in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ipc.wire.messages import Wire

STARTED, TEXT, REASONING, CALLED, FINISHED, HELD, QUEUED, PROMPT = range(8)
"""Kinds of entries: the engine has begun; visible text; text of reasoning; a whole tool call; a choice has ended;
a choice goes on with tokens whose text waits, as the text may become a tool call or a stop string; the prompt is
tokenized, and the request waits for the engine; a piece of the prompt."""

WINDOW_NBYTES = 64 << 10
"""Bytes that a worker sends ahead of the client of one stream."""
LOGPROB_NBYTES = 16
"""Bytes of each log probability on top of its text, about what a message takes for one."""

MOST_LEVELS = 48
"""Levels of lists and objects in the arguments of a call, in requests and in answers: clients send answers back.

Schemas and results of functions have the same limit. Chat templates bound a whole conversation by some more."""

FINISH_REASONS = ("stop", "length", "tool_calls", "canceled")


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
    """A whole tool call: the name, the arguments as compact JSON text, and the beginning of ids of such calls."""

    name: str
    arguments: str
    prefix: str = "call-"


class Start(Wire, frozen=True):
    """The prompt in tokens, and how many of them were found in the prefix cache."""

    prompt_tokens: int
    cached_tokens: int = 0


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
    kinds    STARTED, TEXT, REASONING, CALLED, FINISHED, HELD, QUEUED or PROMPT
    texts    text of TEXT, REASONING and PROMPT, else empty
    tokens   how many tokens the entry stands for
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


class DeltasTaken(Wire, frozen=True, tag="deltas_taken"):
    """Clients have taken so many bytes (`nbytes_of`) of these requests."""

    ids: list[int]
    nbytes: list[int]
