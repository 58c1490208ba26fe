"""Which tokens of which sequences the next step computes.

1. Waiting sequences begin in the order of their arrival, as soon as a place and blocks for all their tokens are free.
   Blocks of a known beginning are taken over (`BlockPool.match`).
2. Every sequence that only waits for its next token computes one token. Prompts share what is left of the budget, the
   oldest first, so a long prompt is computed in chunks beside the others. Chunks whose tokens get log probabilities
   have a budget of their own beside, since each of their tokens costs a row of logits.
3. A sequence that needs a block when none is free takes those of a paused sequence or, without any, of the youngest.
   The loser waits again and computes its tokens once more later.

The oldest sequence can always go on, since no sequence is let in that exceeds the whole cache.
"""

from __future__ import annotations

from collections import deque

from workers.generation.rope import LengthRope
from workers.generation.sequence import ROOT, BlockPool, Link, Sequence, Span


class Scheduler:
    """The sequences of one engine. One thread."""

    def __init__(
        self,
        pool: BlockPool,
        max_sequences: int,
        prefill_tokens: int,
        rope: LengthRope | None = None,
        scored_tokens: int = 512,
    ) -> None:
        """At most `max_sequences` are computed together, with `prefill_tokens` tokens of prompts in one step.

        Of these, `scored_tokens` at most get log probabilities.
        """
        self._pool, self._max_sequences, self.prefill_tokens = pool, max_sequences, prefill_tokens
        self._rope, self._scored_tokens = rope, scored_tokens
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
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended: its blocks are free."""
        sequence.done = True
        for place in (self.running, self.resting, self.waiting):
            if sequence in place:
                place.remove(sequence)
                break
        self._release(sequence)

    def restart(self, sequence: Sequence) -> None:
        """All tokens of a sequence are to be computed anew: the sequence is the first of those that wait."""
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.appendleft(sequence)

    def pause(self, sequence: Sequence) -> None:
        """The client of a sequence does not read: compute no more of the sequence, and give its place away."""
        sequence.paused = True
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

    def plan(self) -> list[Span]:
        """The spans of the next step: single tokens first, then the parts of prompts."""
        self._admit()
        spans, rest = [], []
        for sequence in list(self.running):
            start, stop = sequence.computed, len(sequence.tokens)
            if stop - start > 1:
                rest.append(sequence)
            elif self._has_blocks(sequence, stop):
                spans.append(Span(sequence, start, stop))
        left = max(self._pool.block_tokens, self.prefill_tokens - len(spans))
        scored = self._scored_tokens
        for sequence in rest:
            stop = min(len(sequence.tokens), sequence.computed + left)
            if sequence.tells_prompt:
                stop = min(stop, max(sequence.computed, sequence.scored - 1) + scored)
            if stop > sequence.computed and self._has_blocks(sequence, stop):
                spans.append(Span(sequence, sequence.computed, stop))
                left -= stop - sequence.computed
                scored -= len(spans[-1].scores)
        # NOTE: a later sequence may have taken the blocks of an earlier one that had its span.
        return [span for span in spans if span.sequence.blocks]

    def computed(self, span: Span) -> None:
        """The keys of a span are in the cache."""
        sequence, _, stop = span
        size = self._pool.block_tokens
        sequence.computed = stop
        for number in range(sequence.registered, stop // size):
            tokens = tuple(sequence.tokens[number * size : (number + 1) * size])
            sequence.link = self._pool.register(sequence.blocks[number], sequence.link, tokens)
            sequence.registered = number + 1

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            if self._awaits_sibling(sequence) or not self._begin(sequence):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            self.running.sort(key=_order)

    def _awaits_sibling(self, sequence: Sequence) -> bool:
        """Whether another choice of the same request still computes the prompt, whose blocks this one will share.

        A prompt that is told is told before all choices.
        """
        shared = (sequence.prompt_length - 1) // self._pool.block_tokens
        return sequence.choice > 0 and any(
            other.request is sequence.request and (other.registered < shared or other.tells_prompt)
            for other in self.running
        )

    def _begin(self, sequence: Sequence) -> bool:
        """Hold blocks for all tokens of a waiting sequence; false if too few are free."""
        size, pool = self._pool.block_tokens, self._pool
        if not sequence.blocks:
            # NOTE: what is known of a prompt has no logits, so only tokens that are told already are taken over.
            known = sequence.tokens[: sequence.scored] if sequence.tells_prompt else sequence.tokens
            sequence.blocks, sequence.link = pool.match(known, self._root_of(sequence))
            sequence.registered = len(sequence.blocks)
            sequence.computed = sequence.registered * size
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

    def _root_of(self, sequence: Sequence) -> Link:
        """Sequences share blocks within the space of their requests, and where their tokens have the same positions."""
        space, regime = sequence.call.space, 0 if self._rope is None else self._rope.regime(sequence)
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
        sequence.computed, sequence.registered, sequence.link = 0, 0, ROOT


def _order(sequence: Sequence) -> int:
    return sequence.order
