"""Encode: texts to vectors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ipc.errors import InvalidInput
from ipc.messages import EncodeCall
from workers.adapters.base import Adapter, EncodeOptions, Prepared, TextItem


class Encode:
    """Dense vectors of texts; instruction and query mode only change the text, so they share batches."""

    name = "encode"

    def check(self, adapter: Adapter, call: EncodeCall) -> None:
        """Raise `InvalidInput` when an output is not one of the adapter's."""
        if self.name not in adapter.spec.operations:
            raise InvalidInput(f"this model does not support {self.name}")
        for output in call.outputs:
            if output not in adapter.dims:
                raise InvalidInput(
                    f"params.output_types: this model has no {output!r} output, only {sorted(adapter.dims)}"
                )

    def group(self, call: EncodeCall) -> Hashable:
        """Same outputs, same forward pass."""
        return ("encode", tuple(sorted(call.outputs)))

    def layout(self, adapter: Adapter, call: EncodeCall) -> list[tuple[str, str, tuple[int, ...]]]:
        """One float32 row of the output's width per item."""
        return [(name, "float32", (len(call.items), adapter.dims[name])) for name in call.outputs]

    def prepare(self, adapter: Adapter, call: EncodeCall, start: int, stop: int) -> list[Prepared]:
        """Tokenize."""
        items = [TextItem(item.text, item.ids) for item in call.items[start:stop]]
        return adapter.prepare(items, EncodeOptions(call.instruction, call.is_query))

    def run(self, adapter: Adapter, batch: Any, call: EncodeCall) -> dict[str, torch.Tensor]:
        """Forward pass and pooling; float32 [items, dims] per output."""
        return adapter.encode(batch, frozenset(call.outputs))
