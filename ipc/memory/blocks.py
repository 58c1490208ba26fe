"""First-fit list of free ranges inside one arena. Private to the owner of the arena; holds no data.

Free ranges are kept sorted by offset and joined with their neighbours when they come back, so that free + used is
always the whole and no two ranges overlap.
"""

from __future__ import annotations

import bisect

from ipc.errors import ProtocolError

ALIGNMENT = 4096


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole blocks of `ALIGNMENT` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class BlockList:
    """Allocator over `nbytes` bytes that start at `base`. All sizes are multiples of `ALIGNMENT`."""

    def __init__(self, base: int, nbytes: int) -> None:
        if base % ALIGNMENT or nbytes % ALIGNMENT:
            raise ValueError("base and size must be aligned")
        self._starts = [base]
        self._sizes = [nbytes]
        self._used: dict[int, int] = {}
        self.total_nbytes = nbytes
        self.free_nbytes = nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of at least `nbytes` bytes, or None when no hole is large enough."""
        need = round_up(max(nbytes, 1))
        for index, size in enumerate(self._sizes):
            if size >= need:
                offset = self._starts[index]
                if size == need:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += need
                    self._sizes[index] -= need
                self._used[offset] = need
                self.free_nbytes -= need
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give a range back. Raises `ProtocolError` for an offset that is not allocated."""
        size = self._used.pop(offset, None)
        if size is None:
            raise ProtocolError(f"offset {offset} is not allocated")
        self.free_nbytes += size
        index = bisect.bisect(self._starts, offset)
        if index < len(self._starts) and offset + size == self._starts[index]:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
        else:
            self._starts.insert(index, offset)
            self._sizes.insert(index, size)

    @property
    def used(self) -> dict[int, int]:
        """Copy of the allocated ranges: offset -> nbytes."""
        return dict(self._used)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Free ranges as (offset, nbytes), sorted."""
        return list(zip(self._starts, self._sizes, strict=True))
