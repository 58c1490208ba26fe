"""Penalties on tokens that a context has already: counts of tokens, and DRY for whole repeated passages.

Both follow a sequence from token to token, so a step costs by what is new and by the distinct tokens of the context,
never by the vocabulary. A context is the prompt and the answer so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH = 50
"""Tokens of a repeated passage that DRY looks at."""
_MOST_PENALTY = 1e30
"""A higher penalty of DRY would be infinite in float32."""

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


class Entries(NamedTuple):
    """Numbers of a few tokens: ids int64 [n], no id twice, and values float32 [n]."""

    ids: Ids
    values: Values


class TokenCounts:
    """How often each token stands in a context."""

    def __init__(self, tokens: Sequence[int]) -> None:
        ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
        self._size, self._seen = len(ids), len(tokens)
        self._ids, self._counts = ids, counts.astype(np.float32)
        self._places = {token: place for place, token in enumerate(ids.tolist())}

    def update(self, tokens: Sequence[int]) -> Entries:
        """The counts of a context that has grown at its end. The arrays are views that the next update changes."""
        for token in tokens[self._seen :]:
            place = self._places.setdefault(token, self._size)
            if place == self._size:
                self._append(token)
            self._counts[place] += 1
        self._seen = len(tokens)
        return Entries(self._ids[: self._size], self._counts[: self._size])

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            room = np.zeros(self._size + 16, np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room.astype(np.float32)])
        self._ids[self._size] = token
        self._size += 1


class RepeatedPassages:
    """DRY: a token that would go on with a passage as it went on before loses by the length of the passage.

    A passage ends at a breaker, and no breaker is penalised. A passage of `length` tokens from `allowed` on costs its
    next token `multiplier * base ** (length - allowed)`.
    Source: p-e-w, "DRY: a modern repetition penalty", text-generation-webui pull request 5677, with the bound on the
    length and the order of the tests of mistral.rs 0.8.17 (mistralrs-core/src/sampler.rs).
    """

    def __init__(self, multiplier: float, base: float, allowed: int, breakers: Collection[int]) -> None:
        self._multiplier, self._base, self._allowed = multiplier, base, allowed
        self._breakers = frozenset(breakers)
        self._breaker_ids = np.array(sorted(self._breakers), np.int64)
        self._context, self._size = np.zeros(0, np.int64), 0

    def update(self, tokens: Sequence[int]) -> Entries:
        """The penalties, positive, of a context that has grown at its end."""
        context = self._extend(tokens)
        last = len(context) - 1
        ends = np.flatnonzero(context[:-1] == context[last])
        ends = ends[~np.isin(context[ends + 1], self._breaker_ids)]
        lengths = self._lengths(context, ends)
        ends, lengths = ends[lengths >= self._allowed], lengths[lengths >= self._allowed]
        ids, places = np.unique(context[ends + 1], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, places, lengths)
        with np.errstate(over="ignore"):
            values = self._multiplier * np.power(self._base, (longest - self._allowed).astype(np.float64))
        return Entries(ids, np.clip(values, -_MOST_PENALTY, _MOST_PENALTY).astype(np.float32))

    def _extend(self, tokens: Sequence[int]) -> Ids:
        if len(tokens) > len(self._context):
            grown = np.zeros(len(tokens) + len(tokens) // 2, np.int64)
            grown[: self._size] = self._context[: self._size]
            self._context = grown
        self._context[self._size : len(tokens)] = tokens[self._size :]
        self._size = len(tokens)
        return self._context[: self._size]

    def _lengths(self, context: Ids, ends: Ids) -> Ids:
        """Tokens up to each of `ends` that are also the last of the context, 1 to `LONGEST_MATCH`."""
        last = len(context) - 1
        lengths = np.ones(len(ends), np.int64)
        alive = np.arange(len(ends))
        for length in range(1, LONGEST_MATCH):
            alive = alive[ends[alive] >= length]
            if not len(alive):
                break
            before = context[last - length]
            alive = alive[context[ends[alive] - length] == before]
            if int(before) in self._breakers:
                break
            lengths[alive] = length + 1
        return lengths
