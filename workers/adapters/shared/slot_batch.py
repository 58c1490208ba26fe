"""Batches of models with sequences: a row for each slot, whether it has a request or not, and the control tensors.

The program keeps the state of a sequence, by the row of its slot. So every batch has `max_batch_size` rows (one for a
model that does not batch). In a row without a request numbers are zero, texts are empty, and READY is off. START, END
and READY have the configured values for off and on, CORRID has the ids. A control is [rows, 1], or [rows] where the
program declares one dimension or does not batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ipc.catalog.model_config import Control, ModelConfig
from ipc.errors import InvalidInput
from ipc.memory import copies
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.wire.messages import InferCall, Step
from workers.adapters.shared.named_tensors import (
    CPU,
    NamedBatch,
    NamedInputs,
    Parameter,
    as_tensor,
    host_array,
    read_only,
)

MAX_ID_CHARACTERS = 128


def check_step(config: ModelConfig, call: InferCall) -> Step:
    """The place of a request in its sequence.

    Raises `InvalidInput` for a request with several rows, without a sequence, or with an id that the model cannot take.
    """
    step = call.step
    if call.rows != 1:
        raise InvalidInput(
            f"inference request to model '{config.name}' must specify batch-size 1 due to requirements of sequence "
            f"batcher, got {call.rows}"
        )
    if step is None or not step.id:
        raise InvalidInput(
            f"inference request to model '{config.name}' must specify a non-zero correlation ID"
        )
    if isinstance(step.id, str) and len(step.id) > MAX_ID_CHARACTERS:
        raise InvalidInput(f"sequence_id has {len(step.id)} characters, the limit is {MAX_ID_CHARACTERS}")
    datatype = next((each.datatype for each in _controls(config) if each.kind == "CORRID"), None)
    if datatype is None:
        return step
    shown = f"sequence_id {step.id!a}: model '{config.name}'"
    if isinstance(step.id, str) or datatype == BYTES:
        if not (isinstance(step.id, str) and datatype == BYTES):
            expected = "texts" if datatype == BYTES else f"numbers of {datatype}"
            raise InvalidInput(f"{shown} takes {expected} as ids")
        return step
    bounds = np.iinfo(DATATYPES[datatype].array)
    if not bounds.min <= step.id <= bounds.max:
        raise InvalidInput(f"{shown} takes ids from {bounds.min} to {bounds.max} ({datatype})")
    return step


def _controls(config: ModelConfig) -> tuple[Control, ...]:
    return config.sequence_batching.controls if config.sequence_batching else ()


class SlotBatch(NamedBatch):
    """Requests that run together, each in the row of its slot. `parameters` and `steps` have an entry for each row."""

    def __init__(
        self, requests: Sequence[NamedInputs], slots: Sequence[int | None], config: ModelConfig
    ) -> None:
        """A request without a slot (a warm-up) has the first rows, and READY is off."""
        super().__init__(requests, config)
        self._starts = [0 if slot is None else slot for slot in slots]

    @property
    def rows(self) -> int:
        """One for each slot."""
        return max(1, self._config.max_batch_size)

    @property
    def sizes(self) -> list[int]:
        """Every row stands alone."""
        return [1] * self.rows

    @property
    def names(self) -> list[str]:
        """Names of the given inputs and of the controls."""
        return super().names + [control.name for control in _controls(self._config)]

    @property
    def parameters(self) -> list[Mapping[str, Parameter]]:
        """Parameters of each row."""
        by_row: list[Mapping[str, Parameter]] = [{}] * self.rows
        for start, request in zip(self._starts, self._requests, strict=True):
            by_row[start] = request.parameters
        return by_row

    @property
    def steps(self) -> list[Step | None]:
        """The step of each row, None for a row without a request."""
        by_row: list[Step | None] = [None] * self.rows
        for start, request in zip(self._starts, self._requests, strict=True):
            by_row[start] = request.step
        return by_row

    def array(self, name: str, *, writable: bool = False) -> np.ndarray:
        """An input or control on the host, all rows; read-only unless `writable`.

        Raises `KeyError` for an input that is not given.

        NOTE: no array is a view of the payload. A program may keep an array for the next step, and the next request
        overwrites the payload.
        """
        values = self._of_slots(name, writable)
        return values if writable else read_only(values)

    def _of_slots(self, name: str, writable: bool) -> np.ndarray:
        if name in self._control_arrays:
            control = self._control_arrays[name]
            return control.copy() if writable else control
        if not self._config.batches:
            return super().array(name, writable=True)
        parts = [host_array(request.arrays[name]) for request in self._requests]
        empty = b"" if parts[0].dtype.kind == "O" else 0
        whole = np.full((self.rows, *parts[0].shape[1:]), empty, parts[0].dtype)
        for start, part in zip(self._starts, parts, strict=True):
            whole[start : start + len(part)] = part
            copies.count("join", part.nbytes)
        return whole

    def tensor(self, name: str, device: torch.device = CPU, *, writable: bool = False) -> torch.Tensor:
        """The same as a tensor on `device`; BF16 as `torch.bfloat16`. Raises `TypeError` for BYTES."""
        array = self.array(name, writable=writable)
        if array.dtype.kind == "O":
            raise TypeError(f"input {name!r} is {BYTES}, which no tensor holds")
        values = as_tensor(np.require(array, requirements="A")).to(device)
        if device.type != "cpu":
            copies.count("device", array.nbytes)
        declared = self._config.input(name)
        return values.view(torch.bfloat16) if declared is not None and declared.datatype == "BF16" else values

    @functools.cached_property
    def _control_arrays(self) -> dict[str, np.ndarray]:
        steps, batches = self.steps, self._config.batches
        return {
            control.name: values if control.flat or not batches else values.reshape(-1, 1)
            for control in _controls(self._config)
            for values in [_control_values(control, steps)]
        }


def _control_values(control: Control, steps: Sequence[Step | None]) -> np.ndarray:
    if control.kind == "CORRID":
        if control.datatype == BYTES:
            found = np.empty(len(steps), dtype=object)
            found[:] = [b"" if step is None else str(step.id).encode() for step in steps]
            return found
        ids = [0 if step is None else step.id for step in steps]
        return np.array(ids, DATATYPES[control.datatype].array)
    off, on = control.off_on
    said = {
        "READY": lambda step: True,
        "START": lambda step: step.start,
        "END": lambda step: step.end,
    }[control.kind]
    values = [on if step is not None and said(step) else off for step in steps]
    return np.array(values, DATATYPES[control.datatype].array)
