"""Rotary positions whose factors follow the longest sequence of a forward pass: long-rope, and dynamic NTK.

Beside a longer text such a model gives other vectors, and dynamic factors stay for the passes after. So sequences share
a pass only if the model chooses equal factors for each of them alone.

1. `LengthClasses` finds the rotary modules of a model, and calls each alone with sequences of several lengths. Where
   the result for one position changes with the length, the module has a border: the longest sequence with the factors
   of short ones. Beyond the border there is one other set of factors (long-rope), or one for each length (dynamic).
2. `of` tells the class of a sequence by its length.
3. `reset` gives the modules the factors that they had at load, before each pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from workers.adapters.shared.rectangles import Cut

_PROBED = 3
"""The position whose rotation is compared."""
_SHORT = 8
_LONGEST = 1 << 20
"""No model reads longer sequences; the probe of a length computes two positions."""
_LONGEST_TABLE = 1 << 14
"""The same for modules that compute a table of all positions."""

Rotation = Callable[[nn.Module, int], tuple[torch.Tensor, ...]]
"""Calls a rotary module for a sequence of some length; returns the rotation of position `_PROBED`."""


class _Border(NamedTuple):
    """The longest sequence with the factors of short ones, and whether each longer length has factors of its own."""

    length: int
    varies: bool


class _Kept(NamedTuple):
    """A rotary module with its buffers and plain attributes at load."""

    module: nn.Module
    buffers: dict[str, torch.Tensor | None]
    attributes: dict[str, Any]


class LengthClasses:
    """Which sequences of a model have equal rotary factors."""

    def __init__(self, model: nn.Module) -> None:
        """Probe the rotary modules of `model`, which has run no batch yet and lies on its device."""
        self._borders: set[_Border] = set()
        self._kept: list[_Kept] = []
        for module in model.modules():
            if not any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
                continue
            borders = set(_borders(module))
            if borders:
                self._borders |= borders
                self._kept.append(_kept(module))

    @property
    def many(self) -> bool:
        """Whether there are several classes."""
        return bool(self._borders)

    def of(self, length: int) -> tuple[int, ...]:
        """The class of sequences of this length; longer sequences have the same class or a later one."""
        return tuple(
            0 if length <= border.length else length if border.varies else 1
            for border in sorted(self._borders)
        )

    def within(self, cut: Cut) -> Cut:
        """`cut` with rectangles of one class each."""
        return cut._replace(class_of=self.of) if self.many else cut

    def reset(self) -> None:
        """Forget the lengths of earlier passes."""
        for module, buffers, attributes in self._kept:
            module._buffers.update(buffers)
            module.__dict__.update(attributes)


def _kept(module: nn.Module) -> _Kept:
    plain = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, int | float | torch.Tensor)
    }
    return _Kept(module, dict(module._buffers), plain)


def _borders(module: nn.Module) -> Iterator[_Border]:
    """The border of each kind of layer for which a module computes rotations; none where lengths do not matter."""
    kinds = getattr(module, "rope_type", None)
    for kind in kinds if isinstance(kinds, dict) else (None,):
        named = {} if kind is None else {"layer_type": kind}
        for longest, rotate in _ways(module, named):
            try:
                border = _border(module, rotate, longest)
            # NOTE: code outside of ours may raise anything when called in a way that is not its own.
            except Exception:
                continue
            if border is not None:
                yield border
            break


def _border(module: nn.Module, rotate: Rotation, longest: int) -> _Border | None:
    def equal(one: int, other: int) -> bool:
        pair = zip(rotate(copy.deepcopy(module), one), rotate(copy.deepcopy(module), other), strict=True)
        return all(torch.equal(left, right) for left, right in pair)

    if equal(_SHORT, longest):
        return None
    low, high = _SHORT, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if equal(_SHORT, middle) else (low, middle)
    return _Border(low, not equal(high, longest))


def _ways(module: nn.Module, named: dict[str, Any]) -> Iterator[tuple[int, Rotation]]:
    """Ways to call a rotary module, each with the longest sequence to try: those of transformers, and of model code."""
    device = next(buffer for buffer in module.buffers() if buffer is not None).device
    x = torch.zeros(1, 1, _SHORT, 1, device=device)

    def by_places(sections: int | None) -> Rotation:
        def rotate(rotary: nn.Module, length: int) -> tuple[torch.Tensor, ...]:
            places = torch.tensor([[_PROBED, length - 1]], device=device)
            if sections:
                places = places.expand(sections, 1, 2)
            return tuple(table[..., 0, :] for table in rotary(x, places, **named))

        return rotate

    def by_length(rotary: nn.Module, length: int) -> tuple[torch.Tensor, ...]:
        return tuple(table.reshape(-1, table.shape[-1])[_PROBED] for table in rotary(x, seq_len=length))

    yield _LONGEST, by_places(None)
    yield _LONGEST, by_places(3)
    yield _LONGEST_TABLE, by_length
