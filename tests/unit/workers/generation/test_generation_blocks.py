"""Blocks of the key-value cache: each has one state, and a match never gives a block of other tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from workers.generation.blocks import ROOT, BlockPool

SIZE, TOTAL = 4, 12
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=27).filter(lambda tokens: len(tokens) % SIZE)
"""Few tokens, so that beginnings repeat; never whole blocks, see `test_the_last_token_is_never_covered`."""


class Held:
    """A sequence with all its tokens computed, as far as they fill blocks."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks = tokens, blocks


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; `content` tells the whole text up to the end of each block."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, SIZE)
        self.content: dict[int, list[int]] = {}
        self.held: list[Held] = []

    @rule(target=sequences, tokens=TEXTS)
    def begin(self, tokens: list[int]) -> object:
        blocks, link = self.pool.match(tokens)
        assert len(blocks) * SIZE < len(tokens)
        for number, block in enumerate(blocks):
            assert self.content[block] == tokens[: (number + 1) * SIZE]
        lacking = -(-len(tokens) // SIZE) - len(blocks)
        if lacking > self.pool.available:
            self.pool.release(reversed(blocks))
            return multiple()
        known = len(blocks)
        blocks += self.pool.allocate(lacking)
        for number in range(known, len(tokens) // SIZE):
            part = tuple(tokens[number * SIZE : (number + 1) * SIZE])
            link = self.pool.register(blocks[number], link, part)
            self.content[blocks[number]] = tokens[: (number + 1) * SIZE]
        one = Held(tokens, blocks)
        self.held.append(one)
        return one

    @rule(one=consumes(sequences))
    def end(self, one: Held) -> None:
        self.pool.release(reversed(one.blocks))
        self.held.remove(one)

    @rule(one=sequences)
    def the_text_of_a_living_sequence_is_found(self, one: Held) -> None:
        found, _ = self.pool.match([*one.tokens, 2])
        assert found == one.blocks[: len(one.tokens) // SIZE]
        self.pool.release(reversed(found))

    @invariant()
    def every_block_has_one_state(self) -> None:
        used = {block for one in self.held for block in one.blocks}
        assert self.pool.used == len(used) and self.pool.available == TOTAL - len(used)
        free = [*self.pool._empty, *self.pool._resting]
        assert sorted([*used, *free]) == list(range(TOTAL))
        holders = [sum(block in one.blocks for one in self.held) for block in range(TOTAL)]
        assert self.pool._holders == holders

    @invariant()
    def no_content_is_kept_twice(self) -> None:
        blocks = [block for block, _ in self.pool._found.values()]
        assert len(set(blocks)) == len(blocks) and set(blocks) == set(self.pool._keys)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a text, whole blocks computed."""
    blocks, link = pool.match(tokens)
    known = len(blocks)
    blocks += pool.allocate(-(-len(tokens) // SIZE) - known)
    for number in range(known, len(tokens) // SIZE):
        link = pool.register(blocks[number], link, tuple(tokens[number * SIZE : (number + 1) * SIZE]))
    return blocks


def test_the_last_token_is_never_covered() -> None:
    pool, text = BlockPool(TOTAL, SIZE), list(range(3 * SIZE))
    blocks = filled(pool, text)
    assert pool.match(text)[0] == blocks[:2]
    assert pool.match([*text, 99])[0] == blocks


def test_the_same_content_computed_twice_is_found_once() -> None:
    pool, text = BlockPool(TOTAL, SIZE), list(range(SIZE))
    first, second = pool.allocate(1), pool.allocate(1)
    link = pool.register(first[0], ROOT, tuple(text))
    assert pool.register(second[0], ROOT, tuple(text)) == link
    assert pool.match([*text, 99]) == (first, link)
    pool.release(first + first + second)
    assert pool.available == TOTAL and list(pool._resting) == first


def test_the_content_that_rested_longest_goes_first_and_ends_go_before_beginnings() -> None:
    pool = BlockPool(6, SIZE)
    old, new = list(range(3 * SIZE)), list(range(100, 100 + 3 * SIZE))
    for text in (old, new):
        pool.release(reversed(filled(pool, text)))
    taken = pool.allocate(2)
    assert pool.evictions == 2
    found, _ = pool.match([*old, 99])
    assert len(found) == 1
    pool.release(found)
    found, _ = pool.match([*new, 99])
    assert len(found) == 3
    pool.release([*found, *taken])


def test_what_followed_a_block_that_went_is_not_found_behind_the_same_tokens() -> None:
    pool, text = BlockPool(2, SIZE), list(range(2 * SIZE))
    blocks = filled(pool, text)
    pool.release([blocks[0]])
    (taken,) = pool.allocate(1)
    assert taken == blocks[0] and pool.match([*text, 99])[0] == []
    pool.register(taken, ROOT, tuple(text[:SIZE]))
    assert pool.match([*text, 99])[0] == [taken]


def test_a_pool_without_prefixes_finds_nothing() -> None:
    pool, text = BlockPool(TOTAL, SIZE, keeps_prefixes=False), list(range(3 * SIZE))
    blocks = filled(pool, text)
    assert pool.match(text) == ([], ROOT)
    pool.release(reversed(blocks))
    assert (pool.lookups, pool.hits, pool.available, list(pool._resting)) == (0, 0, TOTAL, [])


def test_a_pool_that_forgets_keeps_its_blocks() -> None:
    pool, text = BlockPool(TOTAL, SIZE), list(range(3 * SIZE))
    pool.release(reversed(filled(pool, text)))
    pool.forget()
    assert pool.match([*text, 99])[0] == [] and sorted(pool.allocate(TOTAL)) == list(range(TOTAL))


def test_sequences_of_different_roots_never_find_each_others_blocks() -> None:
    pool, text = BlockPool(TOTAL, SIZE), list(range(2 * SIZE))
    roots = [ROOT, ("one", 0), ("other", 0), ("one", 33)]
    for root in roots:
        assert pool.match([*text, 99], root) == ([], root)
        blocks, link = pool.allocate(2), root
        for number, block in enumerate(blocks):
            link = pool.register(block, link, tuple(text[number * SIZE : (number + 1) * SIZE]))
        pool.release(reversed(blocks))
        assert pool.match([*text, 99], root) == (blocks, link)
        pool.release(reversed(blocks))
    assert len({tuple(pool.match([*text, 99], root)[0]) for root in roots}) == len(roots)
