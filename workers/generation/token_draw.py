"""Draws a token from each row of probabilities: top-k, top-p, min-p, then one uniform number.

1. Rows without a filter: sums over stretches of columns tell the stretch, and its columns tell the token.
2. Rows with a filter: the likeliest tokens are found without a sort of the vocabulary. The stretches' highest values
   give a floor that enough tokens reach. All tokens above the floor are sorted, and the filters keep the first of them.
3. A row that may keep more than was found is divided by value into thin layers. Sums over layers tell where the filters
   end and which layer the token is in. Only these two layers are sorted.

A token depends on the row, its filters and its uniform number alone, never on the rows beside it: the sums of a row are
made in the order of its columns, those of candidates in float64, and equal probabilities are in the order of their ids.

Penalties on tokens that a context has already: counts of tokens, and DRY for whole repeated passages.

Both follow a sequence from token to token, so a step costs by what is new and by the distinct tokens of the context,
never by the vocabulary. A context is the prompt and the answer so far.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.wire.messages import Sampling

STRETCH = 32
"""Columns that are looked at together. The width of every row is a multiple of this number."""
_LOOK, _WIDEST_LOOK = 128, 1024
"""Candidates of a row, and the most with a large `top_k`."""
_LAYER_BITS = 16
"""Low bits of a float32 that do not count for its layer: the values of a layer differ by less than a hundredth."""
LEAST = float(np.finfo(np.float32).tiny)
"""No filter keeps a token below this probability."""

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
LONGEST_MATCH = 50
"""Tokens of a repeated passage that DRY looks at."""
_MOST_PENALTY = 1e30
"""A higher penalty of DRY would be infinite in float32."""
Values = NDArray[np.float32]


class Filters(NamedTuple):
    """The filters of some rows, each [rows]; what is off keeps every token."""

    top_k: Ids
    top_p: Floats
    min_p: Floats

    def of(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Filters:
        """The filters of some of these rows."""
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def filters_of(samplings: Sequence[Sampling], columns: int) -> Filters:
    """The filters as numbers; values out of their range are off."""
    return Filters(
        np.array([one.top_k if 0 < one.top_k < columns else columns for one in samplings], np.int64),
        np.array([one.top_p if 0 < one.top_p < 1 else np.inf for one in samplings], np.float64),
        np.array([one.min_p if 0 < one.min_p < 1 else 0.0 for one in samplings], np.float64),
    )


def has_filters(sampling: Sampling, columns: int) -> bool:
    """Whether a filter may drop any of so many tokens."""
    return 0 < sampling.top_k < columns or 0 < sampling.top_p < 1 or 0 < sampling.min_p < 1


def draw_unfiltered(probabilities: torch.Tensor, uniforms: Floats) -> Ids:
    """One token for each row of `probabilities` float32 [rows, columns], with `uniforms` [rows] in [0, 1).

    Every row has a positive sum. A token of probability 0 is never drawn.
    """
    stretches = probabilities.unflatten(1, (-1, STRETCH))
    totals = np.cumsum(stretches.sum(-1).cpu().numpy(), axis=1, dtype=np.float64)
    targets = uniforms * totals[:, -1]
    chosen = _first_above(totals, targets)
    rows = np.arange(len(chosen))
    before = np.where(chosen > 0, totals[rows, chosen - 1], 0.0)
    inside = stretches[torch.from_numpy(rows), torch.from_numpy(chosen)].cpu().numpy()
    within = _first_above(np.cumsum(inside, axis=1, dtype=np.float64), targets - before)
    return chosen * STRETCH + within


def _first_above(sums: Floats, targets: Floats) -> Ids:
    """The first column of each row whose running sum is above the target; the last that adds anything at most."""
    targets = np.minimum(targets, np.nextafter(sums[:, -1], 0.0))
    return np.sum(sums <= targets[:, None], axis=1)


def draw_filtered(probabilities: torch.Tensor, samplings: Sequence[Sampling], uniforms: Floats) -> Ids:
    """As `draw_unfiltered`, from the tokens that the filters of each row keep."""
    filters = filters_of(samplings, probabilities.shape[1])
    tokens = np.empty(len(uniforms), np.int64)
    width = probabilities.shape[1]
    highest = probabilities.unflatten(1, (-1, STRETCH)).amax(-1)
    least = np.maximum(highest.amax(-1).cpu().numpy() * filters.min_p, LEAST)
    reached = floors_of(
        highest, np.where(filters.top_k < width, np.minimum(filters.top_k, _WIDEST_LOOK), _LOOK)
    )
    for rows, near in candidates_of(probabilities, highest, np.maximum(reached, least)):
        limits = filters.of(rows)
        kept = _kept(near, limits, least[rows])
        tokens[rows] = _draw_kept(near, kept, uniforms[rows])
        enough = (kept < near.counts) | (kept == limits.top_k) | (reached[rows] <= least[rows])
        for row in rows[~enough].tolist():
            layers = Layers(probabilities[row].cpu().numpy())
            limits = filters.of(np.array([row]))
            tokens[row] = layers.draw(int(limits.top_k[0]), float(limits.top_p[0]), least[row], uniforms[row])
    return tokens


class Layers:
    """One row of probabilities in layers of about the same value, the highest first."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self._values, self._layers = values, (values.view(np.uint32) >> _LAYER_BITS).astype(np.int64)
        self._counts = np.cumsum(np.bincount(self._layers)[::-1])
        self._sums = np.cumsum(np.bincount(self._layers, weights=values)[::-1])
        self._highest = len(self._sums) - 1

    def draw(self, top_k: int, top_p: float, least: float, uniform: float) -> int:
        """A token among those that the filters keep; min-p drops the values up to `least`."""
        lowest = self._highest - (int(np.float32(least).view(np.uint32)) >> _LAYER_BITS)
        ends = (self._counts >= top_k) | (self._sums >= top_p)
        last = min(int(np.argmax(ends)), lowest) if ends.any() else lowest
        # Layers before the last are kept whole.
        before, number = (float(self._sums[last - 1]), int(self._counts[last - 1])) if last else (0.0, 0)
        ids, values = self._tokens_of(last)
        sums = before + np.cumsum(values)
        kept = (values > least) & (number + np.arange(len(ids)) < top_k)
        kept[1:] &= sums[:-1] < top_p
        sums = sums[: max(int(kept.sum()), not last)]
        total = float(sums[-1]) if len(sums) else before
        target = min(uniform * total, np.nextafter(total, 0.0))
        if target >= before:
            return int(ids[np.searchsorted(sums, target, side="right")])
        layer = int(np.searchsorted(self._sums[:last], target, side="right"))
        ids, values = self._tokens_of(layer)
        sums = (float(self._sums[layer - 1]) if layer else 0.0) + np.cumsum(values)
        return int(ids[min(int(np.searchsorted(sums, target, side="right")), len(ids) - 1)])

    def _tokens_of(self, layer: int) -> tuple[Ids, Floats]:
        """The tokens of the layer with this number from the highest, in falling order, with their values."""
        ids = np.flatnonzero(self._layers == self._highest - layer)
        values = self._values[ids].astype(np.float64)
        order = np.argsort(-values, kind="stable")
        return ids[order], values[order]


class Candidates(NamedTuple):
    """The highest tokens of some rows in falling order, [rows, width]; zeros beyond the `counts` [rows]."""

    ids: Ids
    values: Floats
    counts: Ids


def floors_of(highest: torch.Tensor, counts: Ids) -> NDArray[np.float32]:
    """A value for each row that at least `counts` of its columns reach, -inf where no such value is known.

    `highest` float32 [rows, stretches] are the highest values of the stretches.
    """
    stretches = highest.shape[1]
    floors = np.full(len(counts), -np.inf, np.float32)
    known = counts <= stretches
    if known.any():
        falling = highest.topk(int(counts[known].max())).values.cpu().numpy()
        floors[known] = falling[known, counts[known] - 1]
    return floors


def candidates_of(
    values: torch.Tensor, highest: torch.Tensor, floors: NDArray[np.floating]
) -> list[tuple[Ids, Candidates]]:
    """All columns of each row that reach the row's floor, for groups of rows with about as many of them.

    `values` float32 [rows, columns], `highest` as in `floors_of`. A floor of -inf takes all columns.
    """
    # NOTE: one step below, as a floor that was rounded up might be above the highest value.
    floor = np.nextafter(floors.astype(np.float32), np.float32(-np.inf))
    least = torch.from_numpy(floor).to(values.device)[:, None]
    at_row, stretch = (highest >= least).nonzero(as_tuple=True)
    near = values.unflatten(1, (-1, STRETCH))[at_row, stretch]
    place, within = (near >= least[at_row]).nonzero(as_tuple=True)
    ids = (stretch[place] * STRETCH + within).cpu().numpy()
    counts = torch.bincount(at_row[place], minlength=len(values)).cpu().numpy()
    return _sorted(ids, near[place, within].cpu().numpy(), counts)


def _sorted(ids: Ids, values: NDArray[np.float32], counts: Ids) -> list[tuple[Ids, Candidates]]:
    """Rows of similar counts side by side, so that padding stays below half."""
    groups = []
    ends = np.cumsum(counts)
    sizes = np.frexp(counts)[1]
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        width = int(counts[rows].max())
        there = np.arange(width) < counts[rows, None]
        places = (ends[rows] - counts[rows])[:, None] + np.arange(width)
        places = places[there]
        near, columns = np.zeros(there.shape), np.zeros(there.shape, np.int64)
        near[there], columns[there] = values[places], ids[places]
        order = np.argsort(np.where(there, -near, np.inf), axis=1, kind="stable")
        falling = np.take_along_axis(near, order, axis=1)
        groups.append((rows, Candidates(np.take_along_axis(columns, order, axis=1), falling, counts[rows])))
    return groups


def _kept(near: Candidates, filters: Filters, least: Floats) -> Ids:
    """How many candidates of each row the filters keep, at least one."""
    kept = near.values > least[:, None]
    kept &= np.arange(kept.shape[1]) < filters.top_k[:, None]
    kept[:, 1:] &= np.cumsum(near.values, axis=1)[:, :-1] < filters.top_p[:, None]
    return np.maximum(kept.sum(axis=1), 1)


def _draw_kept(near: Candidates, kept: Ids, uniforms: Floats) -> Ids:
    rows, width = np.arange(len(kept)), near.values.shape[1]
    sums = np.cumsum(np.where(np.arange(width) < kept[:, None], near.values, 0.0), axis=1)
    chosen = _first_above(sums, uniforms * sums[:, -1])
    return near.ids[rows, chosen]


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
