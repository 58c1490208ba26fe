"""One choice of one request, as scheduler, step and sampler know the choice.

`tokens` are the prompt and what was chosen so far. Of these, `computed` have keys and values in the cache. The rest is
pending: a whole prompt at first, one token while the choice is written, more after tokens that a grammar forced and
after a preemption. A step computes some pending tokens. If none is left then, the step chooses the next token.
"""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ipc.wire.messages import GenerateCall
from ipc.wire.streams import TokenLogprob
from workers.generation.blocks import ROOT, Link
from workers.generation.request import Emission, GenerationRequest, Matcher


class Output(Protocol):
    """Makes text of the tokens of one choice (`workers.generation.text.ChoiceOutput`)."""

    ended: str | None
    """Why the choice has ended, one of `ipc.wire.streams.FINISH_REASONS`; None while it goes on."""

    def push(self, token: int, logprob: TokenLogprob | None) -> list[Emission]:
        """What one more token adds to the answer."""

    def finish(self, reason: str) -> list[Emission]:
        """The end of the choice: what was held back, and FINISHED."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one choice.

    `order` rises with the arrival. `blocks` hold the keys of the first tokens, and `link` belongs to the last of the
    `registered` blocks that can be found again. `cached_tokens` were found when the sequence first began. `mask` are
    the bits of the tokens that the grammar allows next, where there is a `matcher`. `sampler_state` is the sampler's.
    `is_run`: the blocks of the `table` lie side by side. `scored` tokens of the prompt have their log probabilities, or
    need none; of several choices the first has the prompt scored.
    """

    request: GenerationRequest
    choice: int
    order: int
    output: Output
    matcher: Matcher | None = None
    tokens: list[int] = field(init=False)
    prompt_length: int = field(init=False)
    scored: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    link: Link = ROOT
    registered: int = 0
    cached_tokens: int = -1
    sampler_state: Any = None
    mask: Any = None
    table: NDArray[np.int64] | None = None
    is_run: bool = False
    paused: bool = False
    done: bool = False
    started: bool = False

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        self.tokens, self.prompt_length = list(self.request.prompt), len(self.request.prompt)
        is_scored = self.call.prompt_logprobs is not None and self.choice == 0
        self.scored = 1 if is_scored else self.prompt_length

    @property
    def call(self) -> GenerateCall:
        """What the request asks for."""
        return self.request.call

    @property
    def pending(self) -> int:
        """Tokens without keys in the cache."""
        return len(self.tokens) - self.computed

    @property
    def tells_prompt(self) -> bool:
        """Whether some token of the prompt has still to be told."""
        return self.scored < self.prompt_length

    def block_table(self) -> NDArray[np.int64]:
        """The blocks as int64 [blocks], made anew when they have changed."""
        if self.table is None or len(self.table) != len(self.blocks):
            self.table = np.array(self.blocks, np.int64)
            self.is_run = self.blocks == list(range(self.blocks[0], self.blocks[0] + len(self.blocks)))
        return self.table


class Unfit(Exception):
    """Some `sequences` cannot go on. A step without these may be tried."""

    sequences: collections.abc.Sequence[Sequence]


class Spoiled(Unfit):
    """Text could not be made of the tokens that some `sequences` got; the cause is the error of the first."""

    def __init__(self, sequences: collections.abc.Sequence[Sequence]) -> None:
        super().__init__("tokens could not be taken")
        self.sequences = sequences


class Span(NamedTuple):
    """The tokens `start` to `stop` of a sequence, which one step computes."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        """Whether all tokens of the sequence are computed after the step."""
        return self.stop == len(self.sequence.tokens)

    @property
    def chooses(self) -> bool:
        """Whether the step chooses the next token of the sequence."""
        return self.completes and self.sequence.request.max_tokens > 0

    @property
    def scores(self) -> range:
        """The places of the span whose logits tell the log probability of the next token of the prompt."""
        sequence = self.sequence
        return range(max(self.start, sequence.scored - 1), min(self.stop, sequence.prompt_length - 1))
