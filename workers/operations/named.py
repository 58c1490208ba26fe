"""An output of a batch of named tensors, held against what the model's configuration promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ipc.errors import UnexpectedOutput
from workers.adapters.shared.named_tensors import TensorFacts, host_array


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
