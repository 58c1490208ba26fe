"""The scheduler alone: whatever arrives, rests and goes, every plan can be computed and all sequences end."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.fakes.generating import KeptOutput, request_of
from workers.generation.blocks import BlockPool
from workers.generation.scheduler import Scheduler, Sequence, Span

SIZE = 4


class Bench:
    """A scheduler whose steps choose token 1; `left` are the tokens that each sequence still gets."""

    def __init__(self, blocks: int = 12, max_sequences: int = 4, prefill_tokens: int = 16) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.scheduler = Scheduler(self.pool, max_sequences, prefill_tokens)
        self.max_sequences, self.prefill_tokens = max_sequences, prefill_tokens
        self.left: dict[Sequence, int] = {}
        self._arrived = 0

    @property
    def capacity(self) -> int:
        """Tokens that the cache holds."""
        return self.pool.total * SIZE

    def add(self, prompt: list[int], answer: int = 4, n: int = 1) -> list[Sequence]:
        """A request; its answer is cut to the cache, as the engine does."""
        request = request_of(self._arrived, prompt, n=n)
        added = []
        for choice in range(n):
            sequence = Sequence(request, choice, self._arrived, KeptOutput(request, choice))
            self._arrived += 1
            self.left[sequence] = min(answer, self.capacity - len(prompt))
            self.scheduler.add(sequence)
            added.append(sequence)
        return added

    def step(self) -> list[Span]:
        """Plan, look at the plan, and compute."""
        spans = self.scheduler.plan()
        self.check(spans)
        for span in spans:
            chooses = span.chooses
            self.scheduler.launched(span, span.chooses)
            self.scheduler.landed(span, chooses)
            if chooses:
                span.sequence.tokens.append(1)
                self.left[span.sequence] -= 1
                if not self.left[span.sequence]:
                    self.scheduler.remove(span.sequence)
        return spans

    def check(self, spans: list[Span]) -> None:
        """What the attention needs of a plan."""
        running = self.scheduler.running
        assert len({id(span.sequence) for span in spans}) == len(spans)
        for span in spans:
            assert span.sequence in running
            assert span.sequence.computed == span.start < span.stop <= len(span.sequence.tokens)
            assert len(span.sequence.blocks) * SIZE >= span.stop
        assert not running or running[0] in [span.sequence for span in spans], "the oldest always goes on"
        singles = [span for span in spans if span.sequence.pending == 1]
        assert spans[: len(singles)] == singles, "single tokens come first"
        parts = sum(span.stop - span.start for span in spans[len(singles) :])
        assert parts <= max(SIZE, self.prefill_tokens - len(singles))
        assert len(running) <= self.max_sequences
        assert running == sorted(running, key=lambda sequence: sequence.order)

    def step_until_preemption(self) -> None:
        """Step until blocks are taken from a sequence."""
        for _ in range(100):
            if self.scheduler.preemptions:
                return
            self.step()
        raise AssertionError("no sequence had to give its blocks away")

    def finish(self) -> None:
        """Step until all that do not rest have ended."""
        for _ in range(10_000):
            if not self.scheduler.can_go_on:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences arrive, rest, go on and are cancelled between steps."""

    sequences = Bundle("sequences")

    @initialize(
        blocks=st.integers(4, 16),
        max_sequences=st.integers(1, 5),
        prefill_tokens=st.sampled_from((4, 16, 64)),
    )
    def begin(self, blocks: int, max_sequences: int, prefill_tokens: int) -> None:
        self.bench = Bench(blocks, max_sequences, prefill_tokens)

    @rule(
        target=sequences,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        answer=st.integers(1, 12),
        n=st.integers(1, 3),
    )
    def arrive(self, prompt: list[int], answer: int, n: int) -> Any:
        return self.bench.add(prompt[: self.bench.capacity - 1], answer, n)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.bench.step()

    @rule(choices=sequences)
    def pause(self, choices: list[Sequence]) -> None:
        for sequence in choices:
            if not sequence.done:
                self.bench.scheduler.pause(sequence)

    @rule(choices=sequences)
    def resume(self, choices: list[Sequence]) -> None:
        for sequence in reversed(choices):
            if sequence.paused and not sequence.done:
                self.bench.scheduler.resume(sequence)

    @rule(choices=consumes(sequences))
    def cancel(self, choices: list[Sequence]) -> None:
        for sequence in choices:
            if not sequence.done:
                self.bench.scheduler.remove(sequence)

    @invariant()
    def blocks_belong_to_sequences_that_have_not_ended(self) -> None:
        if not hasattr(self, "bench"):
            return
        scheduler, pool = self.bench.scheduler, self.bench.pool
        alive = [*scheduler.running, *scheduler.waiting, *scheduler.resting]
        assert len(alive) == len(set(map(id, alive))) == len(scheduler)
        assert all(not sequence.blocks for sequence in self.bench.left if sequence.done)
        holders = [0] * pool.total
        for sequence in alive:
            for block in sequence.blocks:
                holders[block] += 1
        assert holders == pool._holders

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.finish()
        for sequence in list(self.bench.scheduler.resting):
            self.bench.scheduler.resume(sequence)
        self.bench.finish()
        assert self.bench.pool.used == 0 and len(self.bench.scheduler) == 0
        assert all(sequence.done for sequence in self.bench.left)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def lengths_of(spans: list[Span]) -> list[int]:
    """Tokens of each span."""
    return [span.stop - span.start for span in spans]


def test_a_long_prompt_is_computed_in_parts_beside_the_others() -> None:
    bench = Bench(blocks=40, prefill_tokens=16)
    bench.add([0] * 5, answer=20)
    assert lengths_of(bench.step()) == [5]
    bench.add([1] * 40)
    bench.add([2] * 3)
    assert [lengths_of(bench.step()) for _ in range(4)] == [[1, 15], [1, 15], [1, 10, 3], [1, 1, 1]]


def test_sequences_begin_in_the_order_of_their_arrival_as_places_come_free() -> None:
    bench = Bench(max_sequences=2, prefill_tokens=64)
    added = [bench.add([number, 9], answer=2 + number)[0] for number in range(4)]
    begun: list[Sequence] = []
    for _ in range(20):
        bench.step()
        begun += [sequence for sequence in added if sequence.computed and sequence not in begun]
        begun += [sequence for sequence in added if sequence.done and sequence not in begun]
    assert begun == added


def test_a_choice_waits_for_the_prompt_that_another_choice_computes() -> None:
    bench = Bench(blocks=40, prefill_tokens=8)
    bench.add([0, 1] * 10, n=3)
    assert [lengths_of(bench.step()) for _ in range(4)] == [[8], [8], [4, 4], [1, 1, 4]]
    assert bench.pool.hits == 2


def test_without_blocks_the_youngest_goes_and_comes_back_before_those_that_wait() -> None:
    bench = Bench(blocks=6, max_sequences=2, prefill_tokens=64)
    old, young, waiting = (bench.add([number] * 7, answer=12)[0] for number in range(3))
    bench.step_until_preemption()
    assert bench.scheduler.running == [old]
    assert list(bench.scheduler.waiting) == [young, waiting] and not young.blocks
    bench.finish()
    assert bench.pool.used == 0


def test_without_blocks_a_paused_sequence_goes_before_one_that_runs() -> None:
    bench = Bench(blocks=9, max_sequences=3, prefill_tokens=64)
    paused, old, young = (bench.add([number] * 6, answer=9)[0] for number in range(3))
    bench.step()
    bench.scheduler.pause(paused)
    assert paused.blocks
    bench.step_until_preemption()
    assert bench.scheduler.running == [old, young] and not paused.blocks


def test_a_sequence_begins_only_where_those_that_run_keep_room_to_grow() -> None:
    bench = Bench(blocks=6, max_sequences=4, prefill_tokens=64)
    for number in range(3):
        bench.add([number] * 8)
    bench.scheduler.plan()
    assert len(bench.scheduler.running) == 2 and len(bench.scheduler.waiting) == 1
