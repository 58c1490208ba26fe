"""What an operation gives back: tensors with a place known beforehand, and loose values of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from ipc.errors import UnexpectedOutput
from workers.adapters.base import ItemFailure
from workers.adapters.shared.named_tensors import TensorFacts, host_array

_ALONE_NUMEL = 1 << 20
"""Host tensors up to this size are summed by one thread."""


@dataclass(slots=True)
class NamedOutput:
    """One output of all requests: `values` [rows, ...] if `batches`, with `rest` as the shape that requests see.

    Values on the host are an array, those on a device a tensor.
    """

    facts: TensorFacts
    values: np.ndarray | torch.Tensor
    rest: list[int]
    batches: bool


def checked(
    facts: TensorFacts, found: Mapping[str, np.ndarray | torch.Tensor], rows: int | None
) -> NamedOutput:
    """The output as the configuration promises it, of `rows` rows (None: the model does not batch).

    Raises `UnexpectedOutput` when it is missing or has another datatype or shape.
    """
    values = found.get(facts.name)
    if not isinstance(values, (np.ndarray, torch.Tensor)):
        raise UnexpectedOutput(f"the model gave no tensor for output {facts.name!a}")
    if not _is_of(facts, values):
        raise UnexpectedOutput(
            f"output {facts.name!a}: the model gave {values.dtype}, its configuration says {facts.datatype}"
        )
    shape = list(values.shape)
    rest = facts.from_program(shape if rows is None else shape[1:])
    if rest is None or (rows is not None and shape[:1] != [rows]):
        expected = list(facts.program) if rows is None else [rows, *facts.program]
        raise UnexpectedOutput(
            f"output {facts.name!a}: the model gave shape {shape}, its configuration says {expected}"
        )
    if isinstance(values, torch.Tensor) and not values.is_cuda:
        values = host_array(values)
    return NamedOutput(facts, values, rest, rows is not None)


def _is_of(facts: TensorFacts, values: np.ndarray | torch.Tensor) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype == facts.dtype
    return values.dtype == facts.tensor_dtype


class Part(NamedTuple):
    """A tensor of a result: name, dtype, shape, and its rows per item (None: one each)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Sequence[int] | None = None


@dataclass(slots=True)
class Results:
    """One batch's results.

    rows      float tensors [items, ...]
    ragged    float tensors [rows of all items, ...], item after item, `Prepared.rows` of each
    loose     per item a host array of any length
    named     outputs of a batch of named tensors; they may have any values
    failures  items that failed alone, by place in the batch
    """

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    ragged: dict[str, torch.Tensor] = field(default_factory=dict)
    loose: dict[str, list[np.ndarray]] = field(default_factory=dict)
    named: dict[str, NamedOutput] = field(default_factory=dict)
    failures: dict[int, ItemFailure] = field(default_factory=dict)

    def finite(self, rows: Sequence[int]) -> list[bool]:
        """For each item of the batch, whether all its values are finite; `rows` are its rows in ragged tensors."""
        if not (self.rows or self.ragged or self.loose):
            return [True] * len(rows)
        flags = np.ones(len(rows), dtype=bool)
        for tensor in self.rows.values():
            if not _all_finite(tensor):
                flags &= torch.isfinite(tensor).flatten(1).all(dim=1).cpu().numpy()
        ends = np.fromiter(accumulate(rows), dtype=np.int64, count=len(rows))
        for tensor in self.ragged.values():
            if not _all_finite(tensor):
                bad = torch.nonzero(~torch.isfinite(tensor).flatten(1).all(dim=1)).flatten().cpu().numpy()
                flags[np.unique(np.searchsorted(ends, bad, side="right"))] = False
        for arrays in self.loose.values():
            for at, array in enumerate(arrays):
                flags[at] &= bool(np.isfinite(array).all()) if array.dtype.kind == "f" else True
        return list(map(bool, flags))


def _all_finite(tensor: torch.Tensor) -> bool:
    # PERF: one pass without a tensor of flags; a sum that overflows only sends the rows to the exact check.
    if tensor.is_cuda or tensor.numel() > _ALONE_NUMEL:
        return bool(torch.isfinite(tensor.sum()))
    # PERF: torch would wake its team for this, and on busy cores waiting for that takes longer than the sum.
    with np.errstate(all="ignore"):
        return math.isfinite(tensor.numpy().sum())
