"""Cut a packed row into rectangles: neighbouring sequences, padded on the right to the longest of them.

A `Cut` says which sequences share a rectangle. Models whose sequences influence each other, or whose results change
with padding, get narrower cuts (`workers.adapters.shared.proving`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

import torch

from workers.adapters.shared.packing import PackedBatch, padding_share


class Cut(NamedTuple):
    """Which neighbours share a rectangle; the row is sorted longest first.

    least_fill  a rectangle ends at a sequence shorter than this share of the rectangle's longest
    most_rows   and at this many rows
    class_of    and at a sequence of another class by its length; None where lengths make no classes
    """

    least_fill: float = 0.8
    most_rows: int = 64
    class_of: Callable[[int], Hashable] | None = None

    def rectangles(self, batch: PackedBatch) -> Iterator[tuple[int, list[int]]]:
        """(first token, lengths) of the sequences of each rectangle."""
        start = 0
        lens: list[int] = []
        for run in batch.layout.runs:
            for _ in range(run.rows):
                if lens and not self._joins(run.length, lens):
                    yield start, lens
                    start += sum(lens)
                    lens = []
                lens.append(run.length)
        yield start, lens

    def padding(self, batches: Iterable[PackedBatch]) -> float:
        """Share of padding, 0 to 1, in the rectangles of these batches."""
        tokens = places = 0
        for batch in batches:
            tokens += batch.ids.numel()
            places += sum(lens[0] * len(lens) for _, lens in self.rectangles(batch))
        return padding_share(tokens, places)

    def _joins(self, length: int, lens: list[int]) -> bool:
        if length < self.least_fill * lens[0] or len(lens) == self.most_rows:
            return False
        return self.class_of is None or self.class_of(length) == self.class_of(lens[0])


PADDED = Cut()
"""Sequences of similar lengths."""
EQUAL = Cut(least_fill=1.0)
"""Sequences of one length."""
ALONE = Cut(most_rows=1)
"""Each sequence alone."""


class Rectangle(NamedTuple):
    """Neighbouring sequences of a packed row, padded on the right to the longest of them.

    place  the tokens of these sequences in the row
    first  number of the first sequence in the row
    ids    int64 [n, longest]
    mask   bool [n, longest], true at tokens
    types  int64 [n, longest] segment ids, or None where the row has none
    """

    place: slice
    first: int
    ids: torch.Tensor
    mask: torch.Tensor
    types: torch.Tensor | None

    def inputs(self, attended: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Arguments of a transformers model; `attended` takes the place of the mask."""
        mask = self.mask if attended is None else attended
        types = {} if self.types is None else {"token_type_ids": self.types}
        return {"input_ids": self.ids, "attention_mask": mask.long(), **types}

    def alone(self) -> Iterator[Rectangle]:
        """Each sequence as a rectangle of its own, without padding."""
        start = self.place.start
        for row, length in enumerate(self.mask.sum(dim=1).tolist()):
            cut = (slice(row, row + 1), slice(0, length))
            types = None if self.types is None else self.types[cut]
            place = slice(start, start + length)
            yield Rectangle(place, self.first + row, self.ids[cut], self.mask[cut], types)
            start += length


def padded(batch: PackedBatch, pad_id: int, cut: Cut = PADDED) -> Iterator[Rectangle]:
    """The row in rectangles on its device."""
    first, device = 0, batch.ids.device
    for start, lens in cut.rectangles(batch):
        place = slice(start, start + sum(lens))
        mask = torch.arange(lens[0], device=device) < torch.tensor(lens, device=device)[:, None]
        ids, types = torch.full(mask.shape, pad_id, device=device), None
        ids[mask] = batch.ids[0, place]
        if batch.types is not None:
            types = torch.zeros_like(ids)
            types[mask] = batch.types[0, place]
        yield Rectangle(place, first, ids, mask, types)
        first += len(lens)
