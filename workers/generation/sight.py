"""The pictures of one sequence: which positions their tokens have, what names them in blocks, what replaces words.

1. `Sight` is made once for each choice of a request with pictures. A choice without pictures has none.
2. Blocks with placeholders get `marks`, the digests of their pictures: two prompts with other pictures in the same
   places share no block.
3. A model with positions in three axes counts rows and columns of a picture (`three_axes`). Behind the last picture the
   three are equal again, and differ from the places in the sequence by `shift`.
4. `lacking` and `held` change while the sequence waits: the tower makes features of pictures whose tokens are not in
   the cache, and the sequence holds these until all tokens of its pictures are computed (`workers.generation.tower`).
5. `Pictured` collects the features of one step for `workers.generation.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from workers.device.transfer import sent
from workers.generation.pictures.family import Features, Picture

Positions = NDArray[np.int64]


class Border(NamedTuple):
    """The places of one picture in a sequence, from `first` to `stop`."""

    first: int
    stop: int


class Sight:
    """The pictures of one choice. Placeholders of one picture may have other tokens between them."""

    def __init__(
        self,
        pictures: list[Picture],
        block_tokens: int,
        *,
        in_axes: bool = False,
        both_ways: bool = False,
    ) -> None:
        """The list may be shared by the choices of a request. `in_axes`: positions count rows and columns.

        `both_ways`: placeholders see the later ones of their picture.
        """
        self.pictures = pictures
        self.borders = [Border(int(each.places[0]), int(each.places[-1]) + 1) for each in pictures]
        self.end = self.borders[-1].stop
        """Tokens up to the end of the last picture."""
        self.both_ways, self.in_axes = both_ways, in_axes
        self.marks = _marks_of(pictures, block_tokens)
        self.positions: Positions | None = None
        self.shift = 0
        if in_axes:
            self.positions, self.shift = three_axes(pictures, self.borders)
        self.lacking: set[bytes] = set()
        """Digests of pictures for whose features the sequence waits."""
        self.held: dict[bytes, Features] = {}

    def take(self, digest: bytes, features: Features) -> None:
        """The features of a picture, whose inputs nobody needs any more."""
        self.held[digest] = features
        self.lacking.discard(digest)
        self._forget_inputs(digest)

    def close(self) -> None:
        """The sequence needs no features any more, or not for now."""
        self.held.clear()
        self.lacking.clear()
        for picture in self.pictures:
            self._forget_inputs(picture.digest)

    def _forget_inputs(self, digest: bytes) -> None:
        for number, picture in enumerate(self.pictures):
            if picture.digest == digest and picture.inputs:
                self.pictures[number] = replace(picture, inputs={})

    def beyond(self, computed: int) -> Iterator[Picture]:
        """The pictures with a token behind the first `computed` ones."""
        for picture, border in zip(self.pictures, self.borders, strict=True):
            if border.stop > computed:
                yield picture

    def fitted(self, start: int, stop: int) -> int:
        """The end of a span that would end at `stop`, moved to the border of a picture that is seen both ways."""
        if self.both_ways:
            for first, end in self.borders:
                if first < stop < end:
                    return first if first > start else end
        return stop

    def whole(self, start: int, stop: int) -> list[Border]:
        """The pictures seen both ways that have tokens in a span."""
        return (
            [each for each in self.borders if each.first < stop and each.stop > start]
            if self.both_ways
            else []
        )

    def positions_of(self, start: int, stop: int) -> Positions:
        """int64 [3, tokens] of a span, of a model with three axes."""
        assert self.positions is not None
        behind = np.arange(max(start, self.end), max(stop, self.end)) + self.shift
        return np.concatenate((self.positions[:, start:stop], np.broadcast_to(behind, (3, len(behind)))), 1)

    def features_of(self, start: int, stop: int) -> Iterator[tuple[NDArray[np.int64], Features, slice]]:
        """For each picture in a span the places of its tokens there, its features, and which of these they are."""
        for picture in self.pictures:
            low, high = (int(number) for number in np.searchsorted(picture.places, (start, stop)))
            if low < high:
                yield picture.places[low:high], self.held[picture.digest], slice(low, high)


def _marks_of(pictures: Sequence[Picture], block_tokens: int) -> dict[int, tuple[bytes | int, ...]]:
    """What the pictures add to the content of blocks: each digest, and which of the picture's tokens come first."""
    marks: dict[int, tuple[bytes | int, ...]] = {}
    for picture in pictures:
        blocks, firsts = np.unique(picture.places // block_tokens, return_index=True)
        for block, first in zip(blocks.tolist(), firsts.tolist(), strict=True):
            marks[block] = (*marks.get(block, ()), picture.digest, first)
    return marks


def three_axes(pictures: Sequence[Picture], borders: Sequence[Border]) -> tuple[Positions, int]:
    """Positions int64 [3, tokens] up to the end of the last picture, and what later positions differ from places by.

    The axes are time, rows and columns. A picture begins at the next position, and the text behind goes on after its
    longer side (M-RoPE, section 2.1 of arXiv:2409.12191).
    """
    positions = np.empty((3, borders[-1].stop), np.int64)
    place = following = 0
    for picture, (first, stop) in zip(pictures, borders, strict=True):
        assert picture.grid is not None
        rows, columns = picture.grid
        positions[:, place:first] = np.arange(following, following + first - place)
        following += first - place
        positions[0, first:stop] = following
        positions[1, first:stop] = following + np.repeat(np.arange(rows), columns)
        positions[2, first:stop] = following + np.tile(np.arange(columns), rows)
        following, place = following + max(rows, columns), stop
    return positions, following - place


class Pictured(NamedTuple):
    """The features of one step: `rows` int64 [places] of the step, `words` and each of `deep` [places, width]."""

    rows: torch.Tensor
    words: torch.Tensor
    deep: list[torch.Tensor]


def pictured(spans: Sequence[tuple[int, int, int, Sight]], device: torch.device) -> Pictured | None:
    """The features of the spans `start` to `stop` at `row` of a step; None without any."""
    rows: list[NDArray[np.int64]] = []
    parts: list[tuple[Features, slice]] = []
    for row, start, stop, sight in spans:
        for places, features, part in sight.features_of(start, stop):
            rows.append(places + (row - start))
            parts.append((features, part))
    if not rows:
        return None
    depth = len(parts[0][0].deep)
    return Pictured(
        sent(np.concatenate(rows), device),
        torch.cat([features.rows[part] for features, part in parts]),
        [torch.cat([features.deep[layer][part] for features, part in parts]) for layer in range(depth)],
    )
