"""Who holds which blocks of the key-value cache, and which block is found again by the tokens of a prompt.

1. A sequence holds its blocks by reference. Several sequences may hold one block with a common beginning.
2. A block whose tokens are all computed gets a `link`: a number for this content behind that beginning. Its key is the
   link of the block before and its own tokens, so a match compares tokens and never only a hash. Placeholders of
   pictures add the digests of their pictures (`Sight.marks`). The link before the first block is the sequence's root:
   sequences with different roots never find each other's blocks.
3. A block that nobody holds keeps its content until the room is needed. The block that rested longest goes first.

A link is never used twice. So a block that goes also hides the blocks that followed it, which go in their turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import count

ROOT = 0
"""The root of sequences that share their beginnings with all others."""

Link = Hashable
"""The number of a block's content, or a root, which is no other number than `ROOT`."""
Content = tuple[Hashable, ...]
"""The tokens of a block, and the marks of pictures behind them."""
Key = tuple[Link, Content]
NO_MARKS: Mapping[int, Content] = {}


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

    def match(
        self,
        tokens: Sequence[int],
        root: Link = ROOT,
        marks: Mapping[int, Content] = NO_MARKS,
    ) -> tuple[list[int], Link]:
        """Hold the blocks of the longest known beginning of `tokens` behind `root`, and the link of the last of them.

        `marks` stand behind the tokens of some blocks. At least one token stays uncovered, since a forward pass needs
        one.
        """
        link: Link = root
        blocks: list[int] = []
        size = self.block_tokens
        if self._keeps_prefixes:
            self.lookups += 1
            for start in range(0, len(tokens) - size, size):
                content = tuple(tokens[start : start + size])
                entry = self._found.get((link, content + marks.get(start // size, ()) if marks else content))
                if entry is None:
                    break
                block, link = entry
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

    def register(self, block: int, before: Link, content: Content) -> Link:
        """All tokens of a block are computed; returns its link. `before` is the link of the block before."""
        if not self._keeps_prefixes:
            return ROOT
        key = before, content
        entry = self._found.get(key)
        if entry is not None:
            # NOTE: two sequences computed the same content at the same time. One of the blocks can be found.
            return entry[1]
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
