"""Features of pictures by the digest of their picture, in a bounded store: the next turn of a conversation finds them.

A sequence holds the features of its pictures until all of their tokens are computed. What nobody holds stays until the
room is needed. The features that rested longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from workers.generation.pictures.family import Features


class _Entry(NamedTuple):
    features: Features
    nbytes: int


class FeatureStore:
    """Features of at most `limit_nbytes` bytes, and of more while sequences hold more. One thread, but for `in`."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self._entries: dict[bytes, _Entry] = {}
        self._holders: dict[bytes, int] = {}
        self._resting: OrderedDict[bytes, None] = OrderedDict()
        self.nbytes = self.held_nbytes = 0
        self.lookups = self.hits = self.evictions = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def hold(self, digest: bytes) -> Features | None:
        """The features of a picture, kept until `release`; None where they are not known."""
        self.lookups += 1
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self.hits += 1
        self._hold(digest, 1)
        return entry.features

    def put(self, digest: bytes, features: Features, holders: int) -> None:
        """Keep features that so many sequences hold, and which the store does not know."""
        nbytes = sum(rows.numel() * rows.element_size() for rows in (features.rows, *features.deep))
        self._entries[digest], self._holders[digest] = _Entry(features, nbytes), 0
        self._resting[digest] = None
        self.nbytes += nbytes
        self._hold(digest, holders)
        self._shrink()

    def release(self, digest: bytes) -> None:
        """One sequence holds these features no more."""
        self._holders[digest] -= 1
        if not self._holders[digest]:
            self.held_nbytes -= self._entries[digest].nbytes
            self._resting[digest] = None
            self._shrink()

    def _hold(self, digest: bytes, holders: int) -> None:
        if holders and not self._holders[digest]:
            del self._resting[digest]
            self.held_nbytes += self._entries[digest].nbytes
        self._holders[digest] += holders

    def _shrink(self) -> None:
        while self.nbytes > self.limit_nbytes and self._resting:
            digest, _ = self._resting.popitem(last=False)
            del self._holders[digest]
            self.nbytes -= self._entries.pop(digest).nbytes
            self.evictions += 1
