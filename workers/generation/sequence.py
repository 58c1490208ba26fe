"""One choice of one request, as scheduler, step and sampler know the choice.

`tokens` are the prompt and what was chosen so far. Of these, `computed` have keys and values in the cache. The rest is
pending: a whole prompt at first, one token while the choice is written, more after tokens that a grammar forced and
after a preemption. A step computes some pending tokens. If none is left then, the step chooses the next token.

`BlockPool` knows who holds which blocks of the key-value cache, and finds blocks again by the tokens of a prompt:

1. A sequence holds its blocks by reference. Several sequences may hold one block with a common beginning.
2. A block whose tokens are all computed gets a `link`: a number for this content behind that beginning. Its key is the
   link of the block before and its own tokens, so a match compares tokens and never only a hash. The link before the
   first block is the sequence's root: sequences with different roots never find each other's blocks.
3. A block that nobody holds keeps its content until the room is needed. The block that rested longest goes first.

A link is never used twice. So a block that goes also hides the blocks that followed it, which go in their turn.
"""

from __future__ import annotations

import collections.abc
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ipc.wire.messages import GenerateCall
from ipc.wire.streams import TokenLogprob
from workers.generation.request import Emission, GenerationRequest, Matcher

ROOT = 0
"""The root of sequences that share their beginnings with all others."""

Link = Hashable
"""The number of a block's content, or a root, which is no other number than `ROOT`."""
Key = tuple[Link, tuple[int, ...]]


class BlockPool:
    """All blocks of one model. One thread."""

    def __init__(self, total: int, block_tokens: int, *, keeps_prefixes: bool = True) -> None:
        """`total` blocks of `block_tokens` tokens each."""
        self.total, self.block_tokens, self._keeps_prefixes = total, block_tokens, keeps_prefixes
        self._empty = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._keys: dict[int, Key] = {}
        self._found: dict[Key, tuple[int, int]] = {}
        """Block and link of every content that can be found."""
        self._resting: OrderedDict[int, None] = OrderedDict()
        self._links = count(ROOT + 1)
        self.lookups = self.hits = self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._resting)

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self.total - self.available

    def match(self, tokens: collections.abc.Sequence[int], root: Link = ROOT) -> tuple[list[int], Link]:
        """Hold the blocks of the longest known beginning of `tokens` behind `root`, and the link of the last of them.

        At least one token stays uncovered, since a forward pass needs one.
        """
        link: Link = root
        blocks: list[int] = []
        size = self.block_tokens
        if self._keeps_prefixes:
            self.lookups += 1
            for start in range(0, len(tokens) - size, size):
                found = self._found.get((link, tuple(tokens[start : start + size])))
                if found is None:
                    break
                block, link = found
                blocks.append(block)
            self.hits += bool(blocks)
        for block in blocks:
            self._hold(block)
        return blocks, link

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            self._resting.pop(block, None)
        self._holders[block] += 1

    def allocate(self, number: int) -> list[int]:
        """Hold so many blocks without content. The caller has looked at `available`."""
        blocks = []
        for _ in range(number):
            block = self._empty.pop() if self._empty else self._evict()
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = self._resting.popitem(last=False)
        del self._found[self._keys.pop(block)]
        self.evictions += 1
        return block

    def register(self, block: int, before: Link, tokens: tuple[int, ...]) -> Link:
        """All tokens of a block are computed; returns its link. `before` is the link of the block before."""
        if not self._keeps_prefixes:
            return ROOT
        key = before, tokens
        found = self._found.get(key)
        if found is not None:
            # NOTE: two sequences computed the same content at the same time. One of the blocks can be found.
            return found[1]
        link = next(self._links)
        self._keys[block], self._found[key] = key, (block, link)
        return link

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks. Those with content rest in this order, so the end of a sequence comes first."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._keys:
                self._resting[block] = None
            else:
                self._empty.append(block)

    def forget(self) -> None:
        """Forget all content: the memory of the cache was lost. No block may be held."""
        self._keys.clear()
        self._found.clear()
        self._empty.extend(self._resting)
        self._resting.clear()


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
