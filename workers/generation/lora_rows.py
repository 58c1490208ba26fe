"""Products of LoRA adapters in one packed step, where each row of the step has the adapter of its request, or none.

1. `rows_of` puts the sequences of a step in the order of their adapters, so that the rows of an adapter are neighbours.
2. At each layer, the weights of all adapters with one rank lie side by side in a `Stack`.
3. A stack adds its products to the result of a layer: one batched product for the single tokens of several adapters,
   and a product for each adapter with many rows (parts of prompts). Adapters with fewer rows than others are filled up.

The layout of the rows is made once a step, and again for each other set of adapters that a layer has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from workers.device.transfer import sent
from workers.generation.scheduler import Span

_MOST_SPARSE = 2
"""A batched product computes at most so many times the rows, or the adapters, that the step has."""


class Delta(NamedTuple):
    """`down` [r, inputs] and `up` [outputs, r] in the layer's dtype on its device; the scale is in `up`."""

    down: torch.Tensor
    up: torch.Tensor


class LoraWeights(Protocol):
    """An adapter that is ready to be used. `serial` is its number, which no other adapter has or will have."""

    @property
    def serial(self) -> int:
        """Above 0."""

    @property
    def digest(self) -> str:
        """Stands for the content of the weights, in all processes."""

    @property
    def deltas(self) -> dict[str, Delta]:
        """By path of the layer in the model."""


class Stretch(NamedTuple):
    """The rows `start` to `stop` of a step have the adapter of this number; None: all rows behind `start`."""

    serial: int
    start: int
    stop: int | None


class WrongRows(ValueError):
    """A layer runs on other rows than the tokens of a step."""


class StepRows:
    """Which rows of a step have which adapter: `singles` in one batch, each of `parts` by itself."""

    def __init__(self, tokens: int | None, singles: Sequence[Stretch], parts: Sequence[Stretch]) -> None:
        """`tokens` is the number of rows; None if unknown. Stretches are in the order of their numbers and rows."""
        self.tokens, self._singles, self._parts = tokens, singles, parts
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def layout(self, members: tuple[int, ...], device: torch.device) -> Layout:
        """The rows of the adapters `members`, which lie in a stack in this order."""
        laid_out = self._layouts.get(members)
        if laid_out is None:
            places = {serial: place for place, serial in enumerate(members)}
            laid_out = _layout(
                [
                    each._replace(serial=places[each.serial])
                    for each in self._singles
                    if each.serial in places
                ],
                [each._replace(serial=places[each.serial]) for each in self._parts if each.serial in places],
                device,
            )
            self._layouts[members] = laid_out
        return laid_out


class StepLoras(Protocol):
    """The adapters of one model, as an engine uses these (`workers.adapters.shared.lora`)."""

    active: bool
    """Whether a step with adapters runs now."""

    def __bool__(self) -> bool:
        """Whether there is any adapter."""

    def get(self, name: str) -> LoraWeights:
        """The adapter of that name. Raises KeyError."""

    def over(self, rows: StepRows | None) -> AbstractContextManager[None]:
        """While entered, the model runs with the adapters of these rows; None: without any."""


def serial_of(span: Span) -> int:
    """The number of the adapter of a span, 0 without one."""
    lora = span.sequence.request.lora
    return 0 if lora is None else lora.serial


def rows_of(spans: list[Span]) -> tuple[list[Span], StepRows | None]:
    """The spans of a step by adapters, single tokens before all others still, and the rows; None without adapters."""
    serials = {serial_of(span) for span in spans}
    if serials == {0}:
        return spans, None
    count = next((at for at, span in enumerate(spans) if span.stop - span.start > 1), len(spans))
    groups = [sorted(spans[:count], key=serial_of), sorted(spans[count:], key=serial_of)]
    row, found = 0, []
    for group in groups:
        stretches = []
        for serial, members in itertools.groupby(group, key=serial_of):
            start, row = row, row + sum(span.stop - span.start for span in members)
            if serial:
                stretches.append(Stretch(serial, start, row))
        found.append(stretches)
    singles, parts = found
    return [*groups[0], *groups[1]], StepRows(row, singles, parts)


def whole(spans: Sequence[Span]) -> StepRows | None:
    """The rows of a step that computes one sequence in passes of its own."""
    serials = {serial_of(span) for span in spans}
    stretches = [Stretch(serial, 0, None) for serial in serials if serial]
    return StepRows(None, [], stretches) if stretches else None


class Gathered(NamedTuple):
    """Rows in a batched product of the adapters `first` to `stop` of a stack, `width` rows for each.

    `start` is the first row where the rows lie side by side without gaps. Else `take` int64 [adapters * width] are the
    rows, with some more in the place of those that an adapter lacks; `put` int64 [rows] are the places of the `rows`.
    """

    first: int
    stop: int
    width: int
    start: int | None
    take: torch.Tensor
    rows: torch.Tensor
    put: torch.Tensor


class Layout(NamedTuple):
    """The rows of a step for one stack; the numbers of `pieces` are places in the stack."""

    batch: Gathered | None
    pieces: Sequence[Stretch]


_NO_ROWS = torch.empty(0, dtype=torch.long)


def _layout(singles: list[Stretch], parts: list[Stretch], device: torch.device) -> Layout:
    pieces = list(parts)
    # NOTE: an adapter with many more rows than others would fill the batch with rows that nobody needs.
    while len(singles) > 1 and len(singles) * _longest(singles) > _MOST_SPARSE * sum(map(_size, singles)):
        longest = max(singles, key=_size)
        singles.remove(longest)
        pieces.append(longest)
    if len(singles) < 2 or singles[-1].serial - singles[0].serial >= _MOST_SPARSE * len(singles):
        return Layout(None, [*singles, *pieces])
    first, stop, width = singles[0].serial, singles[-1].serial + 1, _longest(singles)
    start = singles[0].start
    dense = [Stretch(first + at, start + at * width, start + (at + 1) * width) for at in range(stop - first)]
    if singles == dense:
        return Layout(Gathered(first, stop, width, start, _NO_ROWS, _NO_ROWS, _NO_ROWS), pieces)
    take = np.full((stop - first, width), start, np.int64)
    rows, put = [], []
    for place, begin, end in singles:
        assert end is not None
        own = np.arange(begin, end)
        take[place - first, : len(own)] = own
        rows.append(own)
        put.append((place - first) * width + own - begin)
    tensors = (sent(each, device) for each in (take.reshape(-1), np.concatenate(rows), np.concatenate(put)))
    return Layout(Gathered(first, stop, width, None, *tensors), pieces)


def _size(stretch: Stretch) -> int:
    assert stretch.stop is not None
    return stretch.stop - stretch.start


def _longest(stretches: Iterable[Stretch]) -> int:
    return max(map(_size, stretches))


class Stack:
    """Adapters of one rank at one layer: `down` [adapters, inputs, r] and `up` [adapters, r, outputs]."""

    def __init__(self, members: tuple[int, ...], down: torch.Tensor, up: torch.Tensor) -> None:
        self.members, self.down, self.up = members, down, up

    def add(self, layout: Layout, states: torch.Tensor, result: torch.Tensor) -> None:
        """Add the products of `states` [rows, inputs] to `result` [rows, outputs]."""
        for place, begin, end in layout.pieces:
            result[begin:end].addmm_(torch.mm(states[begin:end], self.down[place]), self.up[place])
        if layout.batch is None:
            return
        first, stop, width, start, take, rows, put = layout.batch
        down, up, count = self.down[first:stop], self.up[first:stop], stop - first
        if start is not None:
            near = slice(start, start + count * width)
            some = states[near].view(count, width, -1)
            # NOTE: a view of rows side by side, so that the sum lands in `result`.
            result[near].view(count, width, -1).baddbmm_(torch.bmm(some, down), up)
            return
        some = states.index_select(0, take).view(count, width, -1)
        changes = torch.bmm(torch.bmm(some, down), up).view(count * width, -1)
        result.index_add_(0, rows, changes.index_select(0, put))


class LoraProducts:
    """The products of all adapters of one model, by the path of each layer."""

    def __init__(self) -> None:
        self._stacks: dict[str, list[Stack]] = {}

    @property
    def paths(self) -> Iterable[str]:
        """The layers that some adapter changes."""
        return self._stacks.keys()

    @torch.inference_mode()
    def arrange(self, adapters: Iterable[LoraWeights]) -> None:
        """Lay the weights of exactly these adapters out. Their `deltas` become views of the stacks."""
        ordered = sorted(adapters, key=lambda each: each.serial)
        paths = dict.fromkeys(path for each in ordered for path in each.deltas)
        for path in self._stacks.keys() - paths.keys():
            del self._stacks[path]
        for path in paths:
            self._stacks[path] = _stacked(path, [each for each in ordered if path in each.deltas])

    def add(self, path: str, rows: StepRows, states: torch.Tensor, result: torch.Tensor) -> None:
        """Add the products of a layer. Raises `WrongRows` where the layer ran on other rows than those of the step."""
        flat, whole = states.reshape(-1, states.shape[-1]), result.view(-1, result.shape[-1])
        if rows.tokens is not None and len(flat) != rows.tokens:
            raise WrongRows(f"{path}: the layer runs on {len(flat)} rows in a step of {rows.tokens} tokens")
        for stack in self._stacks[path]:
            stack.add(rows.layout(stack.members, flat.device), flat, whole)


def _stacked(path: str, adapters: Sequence[LoraWeights]) -> list[Stack]:
    by_rank: dict[int, list[LoraWeights]] = {}
    for each in adapters:
        by_rank.setdefault(each.deltas[path].down.shape[0], []).append(each)
    stacks = []
    for members in by_rank.values():
        down = torch.stack([each.deltas[path].down.t() for each in members])
        up = torch.stack([each.deltas[path].up.t() for each in members])
        for each, one, other in zip(members, down, up, strict=True):
            each.deltas[path] = Delta(one.t(), other.t())
        stacks.append(Stack(tuple(each.serial for each in members), down, up))
    return stacks
