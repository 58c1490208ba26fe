"""Base of the families that run programs over named tensors.

A family says its `config` and runs `infer`; what encode and its kin need is answered here. Requests are checked and
prepared by `workers.operations.infer`.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ipc.catalog.model_config import ROW_COST, ModelConfig
from ipc.errors import InvalidInput
from ipc.memory.datatypes import BYTES, DATATYPES
from ipc.wire.messages import Call, InputItem
from workers.adapters.base import Adapter, Gathering, ItemFailure, Prepared
from workers.adapters.shared.named_tensors import Array, NamedBatch
from workers.adapters.shared.signature import Signature
from workers.adapters.shared.slot_batch import SlotBatch

Sample = dict[str, np.ndarray]


class ProgramAdapter(Adapter):
    """One loaded program; `spec.operations` is `("infer",)`."""

    @property
    @abstractmethod
    def config(self) -> ModelConfig:
        """What the program takes and gives; the same object as long as the adapter lives."""

    @abstractmethod
    def infer(self, batch: NamedBatch) -> Mapping[str, np.ndarray | torch.Tensor]:
        """Run one batch; see `Adapter.infer`."""

    @functools.cached_property
    def signature(self) -> Signature:
        """The configuration as requests are checked against it."""
        return Signature(self.config)

    @functools.cached_property
    def gathering(self) -> Gathering | None:  # type: ignore[override]
        """By dynamic batching, where that has a delay or preferred sizes; requests of a stream run alone."""
        batching = self.config.dynamic_batching
        if (
            self.streams
            or batching is None
            or not (batching.max_queue_delay_us or batching.preferred_batch_sizes)
        ):
            return None
        preferred = tuple(ROW_COST * rows for rows in sorted(batching.preferred_batch_sizes))
        full = preferred[-1] if preferred else ROW_COST * self.config.max_batch_size
        return Gathering(batching.max_queue_delay_us * 1000, full, preferred)

    @functools.cached_property
    def batch_tokens(self) -> int | None:  # type: ignore[override]
        """Those of the rows that the program takes; of a program without a batch dimension those of one request."""
        if self.streams:
            return 1
        return ROW_COST * max(1, self.config.max_batch_size)

    @property
    def repeatable(self) -> bool:  # type: ignore[override]
        """Programs of sequences keep state, and what a decoupled one has answered cannot be taken back."""
        return self.config.sequence_batching is None and not self.config.decoupled

    @property
    def streams(self) -> bool:  # type: ignore[override]
        """Decoupled programs answer in parts."""
        return self.config.decoupled

    @property
    def max_sequence_length(self) -> int:
        """Programs have none."""
        return 0

    @property
    def dims(self) -> dict[str, int]:
        """Programs give no vectors of a known kind; their outputs are in `config`."""
        return {}

    def samples(self) -> list[Sample]:
        """Inputs to run once when the model was loaded, in the shapes that a request would have, rows included.

        They belong to no sequence. A sample that raises fails the load only when `samples_must_run`.
        """
        return [zeros(self.config)]

    @property
    def samples_must_run(self) -> bool:
        """Whether the samples are known to suit the model: those of its warm-up are, zeros may not be."""
        return False

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Raise `InvalidInput` for values of one request that the program cannot take.

        They are in the shapes of the program. Called before the request joins a batch, on any of the preparing threads.
        """

    def prepare(self, items: Sequence[InputItem], call: Call) -> list[Prepared | ItemFailure]:
        """Programs take no items."""
        raise InvalidInput("this model takes named tensors only")

    def collate(self, prepared: Sequence[Prepared]) -> Any:
        """A `NamedBatch` of the prepared requests; joining is left to who takes a tensor from it.

        Raises `ValueError` for several requests that have more rows together than the program takes.
        """
        requests, config = [item.payload for item in prepared], self.config
        rows, most = sum(request.rows for request in requests), max(1, config.max_batch_size)
        if len(requests) > 1 and rows > most:
            raise ValueError(
                f"{len(requests)} requests have {rows} rows, max_batch_size allows {most} in a batch"
            )
        if config.sequence_batching is not None:
            return SlotBatch(requests, [item.slot for item in prepared], config)
        return NamedBatch(requests, config)


def zeros(config: ModelConfig) -> Sample:
    """One row of zeros (empty texts for BYTES) for every input that is not optional; a dimension of any size is 1."""
    found: Sample = {}
    for tensor in config.inputs:
        if tensor.optional:
            continue
        shape = [1] * config.batches + [max(dim, 1) if dim < 0 else dim for dim in tensor.dims]
        if tensor.datatype == BYTES:
            found[tensor.name] = np.full(shape, b"", dtype=object)
        else:
            found[tensor.name] = np.zeros(shape, dtype=DATATYPES[tensor.datatype].array)
    return found
