"""What can be asked of a model: one file per operation, found by the type of the call.

The executor knows no operation by name. It asks for the group of a call, the layout of its result, the prepared items,
and runs a batch.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch

from ipc.messages import Call, EncodeCall
from workers.adapters.base import Adapter, Prepared
from workers.operations.encode import Encode


class Operation(Protocol):
    """One operation over any adapter that offers it."""

    name: str

    def check(self, adapter: Adapter, call: Call) -> None:
        """Raise `InvalidInput` when the adapter cannot answer this call."""

    def group(self, call: Call) -> Hashable:
        """Calls with equal groups may share a forward pass."""

    def layout(self, adapter: Adapter, call: Call) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of each tensor of the result; the first dimension is the item."""

    def prepare(self, adapter: Adapter, call: Call, start: int, stop: int) -> list[Prepared]:
        """Items `start` to `stop` made ready for the device."""

    def run(self, adapter: Adapter, batch: Any, call: Call) -> dict[str, torch.Tensor]:
        """One forward pass over a collated batch; tensors on the device, one row per item."""


_BY_CALL: dict[type, Operation] = {EncodeCall: Encode()}


def operation_of(call: Call) -> Operation:
    """The operation that a call asks for."""
    return _BY_CALL[type(call)]
