"""Encode: items to vectors, all outputs of a call from one forward pass."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ipc.errors import InvalidInput
from ipc.wire.messages import EncodeCall
from workers.adapters.base import Adapter, ItemFailure, Prepared, SparseRows
from workers.memory.payload import Payload
from workers.operations.results import Part, Results


class Encode:
    """Dense vectors have a fixed width, token vectors as many rows as the item has tokens, sparse ones come loose."""

    name = "encode"
    itemized = True
    refuses = False
    on_device = True

    def check(self, adapter: Adapter, call: EncodeCall) -> None:
        """Raise `InvalidInput` when an output is not one of the adapter's, or it makes no chunks."""
        if call.chunking is not None and adapter.chunk_refusal:
            raise InvalidInput(f"{call.names.options}late_chunking: {adapter.chunk_refusal}")
        for output in call.outputs:
            if output not in adapter.dims and not (output == "chunks" and call.chunking is not None):
                raise InvalidInput(
                    f"params.output_types: this model has no {output!r} output, only {sorted(adapter.dims)}"
                )

    def group(self, call: EncodeCall) -> Hashable:
        """Same outputs, same forward pass; instruction and query mode only change the text."""
        return tuple(sorted(call.outputs))

    def instant(self, call: EncodeCall) -> bool:
        """Tokenizing takes its time."""
        return False

    def needs_prepared(self, call: EncodeCall) -> bool:
        """How many token vectors or chunks there will be is known once the items are tokens."""
        return "multivector" in call.outputs or call.chunking is not None

    def layout(self, adapter: Adapter, call: EncodeCall, prepared: Sequence[Prepared]) -> list[Part]:
        """float32 rows: one per item, or as many as it has tokens or chunks."""
        items, parts = len(call.items), []
        if "dense" in call.outputs:
            parts.append(Part("dense", "float32", (items, adapter.dims["dense"])))
        for name, width in (("multivector", "multivector"), ("chunks", "dense")):
            if name in call.outputs:
                rows = [item.rows for item in prepared]
                parts.append(Part(name, "float32", (sum(rows), adapter.dims[width]), rows))
        return parts

    def prepare(
        self, adapter: Adapter, call: EncodeCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared | ItemFailure]:
        """Tokenize, decode images."""
        return adapter.prepare(call.items[start:stop], call)

    def run(self, adapter: Adapter, batch: Any, call: EncodeCall) -> Results:
        """One forward pass with the heads of all outputs."""
        results = Results()
        if call.chunking is not None:
            chunks = adapter.encode_chunks(batch)
            results.ragged["chunks"], results.loose["chunks.spans"] = chunks.vectors, chunks.spans
            return results
        for name, values in adapter.encode(batch, frozenset(call.outputs)).items():
            if isinstance(values, SparseRows):
                results.loose["sparse.indices"] = values.indices
                results.loose["sparse.values"] = values.values
            elif name == "multivector":
                results.ragged[name] = values
            else:
                results.rows[name] = values
        return results
