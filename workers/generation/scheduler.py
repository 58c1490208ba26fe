"""The choices of requests, the blocks that they hold, and the tokens that the next step computes.

A `Sequence` is one choice of one request. `tokens` are the prompt and what was chosen so far. Of these, `computed` have
keys and values in the cache. The rest is pending: a whole prompt at first, one token while the choice is written, more
after tokens that a grammar forced and after a preemption. A step computes some pending tokens. If none is left then,
the step chooses the next token.

A step is launched, and lands once the host has read what the step chose. `computed` counts the tokens of launched
steps, and `ahead` the tokens that these have chosen and the host has not read. A sequence that ends, pauses or loses
its blocks meanwhile forgets its steps that have not landed (`Scheduler.revoke`), and computes them again if it goes on.

`Scheduler` plans the steps:

1. Waiting sequences begin in the order of their arrival, as soon as a place and blocks for all their tokens are free.
   Blocks of a known beginning are taken over (`BlockPool.match`). A sequence that waits for features of its pictures
   lets later ones pass.
2. Every sequence that only waits for its next token computes one token. Prompts share what is left of the budget, the
   oldest first, so a long prompt is computed in chunks beside the others. Chunks whose tokens get log probabilities
   have a budget of their own beside, since each of their tokens costs a row of logits.
3. A sequence that needs a block when none is free takes those of a paused sequence or, without any, of the youngest.
   The loser waits again and computes its tokens once more later.

The oldest sequence can always go on, since no sequence is let in that exceeds the whole cache.
"""

from __future__ import annotations

import collections.abc
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ipc.wire.messages import GenerateCall
from ipc.wire.streams import TokenLogprob
from workers.generation.blocks import NO_MARKS, ROOT, BlockPool, Content, Link
from workers.generation.request import Emission, GenerationRequest, Matcher
from workers.generation.sight import Sight


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
    need none; of several choices the first has the prompt scored. `given` tokens were there at the beginning: the
    prompt, and what an earlier worker has written. `told` tokens are those whose ids the frontend has. `tells_prompt`:
    some token of the prompt has still to be told. `leads`: the
    request begins with this choice, the first that has not ended. A choice with pictures has a `sight`; its first
    `pictured` tokens end with the last picture, behind which positions differ from places by `shift`. Of the `computed`
    tokens `landed` belong to steps that have landed; `turn` counts how often the other steps were revoked.
    """

    request: GenerationRequest
    choice: int
    order: int
    output: Output
    matcher: Matcher | None = None
    tokens: list[int] = field(init=False)
    prompt_length: int = field(init=False)
    scored: int = field(init=False)
    tells_prompt: bool = field(init=False)
    given: int = field(init=False)
    told: int = field(init=False)
    computed: int = 0
    landed: int = 0
    ahead: int = 0
    turn: int = 0
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
    leads: bool = False
    sight: Sight | None = None
    pictured: int = 0
    shift: int = 0

    def __post_init__(self) -> None:
        """Begin with the prompt and what an earlier worker has written, which is replayed in silence."""
        request = self.request
        self.tokens, self.prompt_length = list(request.prompt), len(request.prompt)
        # NOTE: an earlier worker told the prompt before any choice.
        is_scored = self.call.prompt_logprobs is not None and self.choice == 0 and not request.is_carried_on
        self.note_scored(1 if is_scored else self.prompt_length)
        for token in request.written_of(self.choice):
            self.tokens.append(token)
            self.output.push(token, None)
            if self.matcher is not None:
                self.matcher.consume(token)
        self.given = self.told = len(self.tokens)

    def note_scored(self, count: int) -> None:
        """The first `count` tokens of the prompt have their log probabilities, or need none."""
        self.scored, self.tells_prompt = count, count < self.prompt_length

    def append(self, token: int) -> None:
        """The host has the next token."""
        if len(self.tokens) == self.given:
            self.request.phases.wrote()
        self.tokens.append(token)

    def untold(self) -> bytes:
        """The ids of the tokens that were not told before, in the form of `ipc.wire.messages.Written`."""
        ids, self.told = self.tokens[self.told :], len(self.tokens)
        return array("I", ids).tobytes()

    def see(self, sight: Sight) -> None:
        """The pictures of the prompt."""
        self.sight, self.pictured, self.shift = sight, sight.end, sight.shift

    @property
    def call(self) -> GenerateCall:
        """What the request asks for."""
        return self.request.call

    @property
    def length(self) -> int:
        """The tokens, with those that the host has not read."""
        return len(self.tokens) + self.ahead

    @property
    def pending(self) -> int:
        """Tokens without keys in the cache."""
        return self.length - self.computed

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


class Unseen(Unfit):
    """A picture of `sequences` has no features; `error` says why."""

    def __init__(self, sequences: collections.abc.Sequence[Sequence], error: Exception) -> None:
        super().__init__("a picture could not be seen")
        self.sequences, self.error = sequences, error


class Span(NamedTuple):
    """The tokens `start` to `stop` of a sequence, which one step computes."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        """Whether all tokens of the sequence are computed after the step. Asked before the step is launched."""
        return self.stop == self.sequence.length

    @property
    def chooses(self) -> bool:
        """Whether the step chooses the next token of the sequence. Asked before the step is launched."""
        return self.completes and self.sequence.request.max_tokens > 0

    @property
    def scores(self) -> range:
        """The places of the span whose logits tell the log probability of the next token of the prompt."""
        sequence = self.sequence
        return range(max(self.start, sequence.scored - 1), min(self.stop, sequence.prompt_length - 1))


class Positions(Protocol):
    """The positions of a model whose tokens turn by the length of their text (`workers.generation.rope`)."""

    def regime(self, sequence: Sequence) -> int:
        """Sequences with equal numbers have equal positions."""


class Eyes(Protocol):
    """Finds features of pictures (`workers.generation.tower.Tower`)."""

    def ready(self, sequence: Sequence) -> bool:
        """Whether a sequence holds the features of all pictures behind its computed tokens; asks for the others."""

    def release(self, sequence: Sequence) -> None:
        """The sequence needs no features any more."""


class Scheduler:
    """The sequences of one engine. One thread."""

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        prefill_tokens: int,
        rope: Positions | None = None,
        scored_tokens: int = 512,
        eyes: Eyes | None = None,
    ) -> None:
        """At most `max_sequences` are computed together, with `prefill_tokens` tokens of prompts in one step.

        Of these, `scored_tokens` at most get log probabilities. Sequences with a `sight` need `eyes`.
        """
        self._pool, self._max_sequences, self.prefill_tokens = pool, max_sequences, prefill_tokens
        self._rope, self._scored_tokens, self._eyes = rope, scored_tokens, eyes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of arrival."""
        self.resting: list[Sequence] = []
        """Sequences whose clients do not read. They keep their blocks while nobody needs those."""
        self.preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.resting)

    @property
    def can_go_on(self) -> bool:
        """Whether a step would compute something."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """A sequence arrives."""
        sequence.request.phases.arrived()
        self.waiting.append(sequence)

    def add_first(self, sequence: Sequence) -> None:
        """A sequence arrives whose client has its beginning from another worker: it goes before those that wait."""
        sequence.request.phases.arrived()
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended: its blocks are free."""
        sequence.done = True
        for place in (self.running, self.resting, self.waiting):
            if sequence in place:
                place.remove(sequence)
                break
        self._release(sequence)
        self._close_eyes(sequence)

    def restart(self, sequence: Sequence) -> None:
        """All tokens of a sequence are to be computed anew: the sequence is the first of those that wait."""
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.appendleft(sequence)

    @staticmethod
    def revoke(sequence: Sequence) -> None:
        """Forget the steps of a sequence that have not landed: their tokens are thrown away."""
        sequence.turn += 1
        sequence.ahead, sequence.computed = 0, sequence.landed

    def pause(self, sequence: Sequence) -> None:
        """The client of a sequence does not read: compute no more of the sequence, and give its place away."""
        sequence.paused = True
        self.revoke(sequence)
        for place in (self.running, self.waiting):
            if sequence in place:
                place.remove(sequence)
                self.resting.append(sequence)
                return

    def resume(self, sequence: Sequence) -> None:
        """The client reads again: the sequence is the first of those that wait."""
        sequence.paused = False
        if sequence in self.resting:
            self.resting.remove(sequence)
            self.waiting.appendleft(sequence)

    def plan(self, runs_ahead: Callable[[Sequence], bool] = lambda sequence: False) -> list[Span]:
        """The spans of the next step: single tokens first, then the parts of prompts.

        `runs_ahead` tells whether a sequence goes on behind a token that the host has not read.
        """
        if self.waiting:
            self._admit()
        spans: list[Span] = []
        rest: list[Sequence] = []
        size, preemptions = self._pool.block_tokens, self.preemptions
        for sequence in list(self.running):
            start, stop = sequence.computed, len(sequence.tokens) + sequence.ahead
            if start == stop or (sequence.ahead and not runs_ahead(sequence)):
                continue
            if stop - start > 1:
                rest.append(sequence)
            elif stop <= len(sequence.blocks) * size or self._has_blocks(sequence, stop):
                spans.append(Span(sequence, start, stop))
        if rest:
            self._plan_prompts(rest, spans)
        if self.preemptions == preemptions:
            return spans
        # NOTE: a later sequence may have taken the blocks of an earlier one that had its span.
        return [span for span in spans if span.sequence.blocks]

    def _plan_prompts(self, sequences: list[Sequence], spans: list[Span]) -> None:
        """Add parts of prompts to the single tokens of a step."""
        left = max(self._pool.block_tokens, self.prefill_tokens - len(spans))
        scored = self._scored_tokens
        for sequence in sequences:
            stop = min(len(sequence.tokens), sequence.computed + left)
            if sequence.tells_prompt:
                stop = min(stop, max(sequence.computed, sequence.scored - 1) + scored)
            if sequence.sight is not None and stop > sequence.computed:
                stop = sequence.sight.fitted(sequence.computed, stop)
            if stop > sequence.computed and self._has_blocks(sequence, stop):
                spans.append(Span(sequence, sequence.computed, stop))
                left -= stop - sequence.computed
                if sequence.tells_prompt:
                    scored -= len(spans[-1].scores)

    @staticmethod
    def launched(span: Span, chooses: bool) -> None:
        """A step that computes a span is on its way, and `chooses` the next token behind the span, or does not."""
        sequence, start, stop = span
        if start < sequence.given:
            sequence.request.phases.stepped()
        sequence.ahead += chooses
        sequence.computed = stop

    def landed(self, span: Span, chose: bool) -> None:
        """The keys of a span are in the cache; the token that the step `chose` is appended next."""
        sequence, _, stop = span
        sequence.landed = stop
        sequence.ahead -= chose
        if stop // self._pool.block_tokens > sequence.registered:
            self._register(sequence, stop // self._pool.block_tokens)
        if sequence.sight is not None and stop >= sequence.pictured:
            self._close_eyes(sequence)

    def _register(self, sequence: Sequence, count: int) -> None:
        """The first `count` blocks of a sequence have their whole content, and can be found by later requests."""
        size = self._pool.block_tokens
        for number in range(sequence.registered, count):
            content: Content = tuple(sequence.tokens[number * size : (number + 1) * size])
            if sequence.sight is not None:
                content += sequence.sight.marks.get(number, ())
            sequence.link = self._pool.register(sequence.blocks[number], sequence.link, content)
            sequence.registered = number + 1

    def _close_eyes(self, sequence: Sequence) -> None:
        if sequence.sight is not None and self._eyes is not None:
            self._eyes.release(sequence)

    def _admit(self) -> None:
        place = 0
        while place < len(self.waiting) and len(self.running) < self._max_sequences:
            sequence = self.waiting[place]
            if self._awaits_sibling(sequence):
                return
            if sequence.sight is not None and not self._sees(sequence, sequence.sight):
                place += 1
                continue
            if not self._begin(sequence):
                return
            del self.waiting[place]
            running = self.running
            running.append(sequence)
            # PERF: most sequences begin in the order of their arrival.
            if len(running) > 1 and sequence.order < running[-2].order:
                running.sort(key=_order)

    def _sees(self, sequence: Sequence, sight: Sight) -> bool:
        """Whether the features are there for all tokens that a waiting sequence has to compute."""
        assert self._eyes is not None
        if not sight.lacking:
            self._match(sequence)
        is_ready = self._eyes.ready(sequence)
        if not is_ready:
            self._release(sequence)
        return is_ready

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether another choice of the same request still computes the prompt, whose blocks this one will share.

        A prompt that is told is told before all choices.
        """
        if sequence.choice == 0:
            return False
        shared = (sequence.prompt_length - 1) // self._pool.block_tokens
        return any(
            other.request is sequence.request and (other.registered < shared or other.tells_prompt)
            for other in self.running
        )

    def _begin(self, sequence: Sequence) -> bool:
        """Hold blocks for all tokens of a waiting sequence; false if too few are free."""
        size, pool = self._pool.block_tokens, self._pool
        self._match(sequence)
        lacking = -(-len(sequence.tokens) // size) - len(sequence.blocks)
        # NOTE: every running sequence may need a block soon. Without this reserve new ones would be preempted at once.
        while lacking + len(self.running) > pool.available:
            idle = None if self.running else self._idle_holder(sequence)
            if idle is None:
                self._release(sequence)
                return False
            self._release(idle)
        sequence.blocks.extend(pool.allocate(lacking))
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        return True

    def _match(self, sequence: Sequence) -> None:
        """Hold the blocks of the known beginning of a waiting sequence."""
        if sequence.blocks:
            return
        # NOTE: what is known of a prompt has no logits, so only tokens that are told already are taken over.
        known = sequence.tokens[: sequence.scored] if sequence.tells_prompt else sequence.tokens
        marks = NO_MARKS if sequence.sight is None else sequence.sight.marks
        sequence.blocks, sequence.link = self._pool.match(known, self._root_of(sequence), marks)
        sequence.registered = len(sequence.blocks)
        sequence.computed = sequence.landed = sequence.registered * self._pool.block_tokens

    def _root_of(self, sequence: Sequence) -> Link:
        """Sequences share blocks within the space of their requests, with equal adapters and equal positions."""
        space, regime = sequence.call.space, 0 if self._rope is None else self._rope.regime(sequence)
        lora = sequence.request.lora
        if lora is not None:
            return (space, regime, lora.serial)
        return (space, regime) if space or regime else ROOT

    def _has_blocks(self, sequence: Sequence, tokens: int) -> bool:
        """Give a running sequence blocks for its first `tokens`; false if the sequence itself had to go."""
        if not sequence.blocks:
            return False
        lacking = -(-tokens // self._pool.block_tokens) - len(sequence.blocks)
        if lacking <= 0:
            return True
        while lacking > self._pool.available:
            self.preemptions += 1
            idle = self._idle_holder(sequence)
            if idle is not None:
                self._release(idle)
                continue
            victim = self.running.pop()
            self._release(victim)
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._pool.allocate(lacking))
        return True

    def _idle_holder(self, sequence: Sequence) -> Sequence | None:
        """A sequence, not this one, that holds blocks and is not running."""
        idle = (*self.resting, *self.waiting)
        return next((other for other in idle if other.blocks and other is not sequence), None)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(reversed(sequence.blocks))
        sequence.blocks, sequence.table = [], None
        sequence.landed, sequence.registered, sequence.link = 0, 0, ROOT
        self.revoke(sequence)


def _order(sequence: Sequence) -> int:
    return sequence.order
