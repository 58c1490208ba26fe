"""Infer: named tensors to named tensors, requests joined along their rows. One request is one item.

1. `check` holds names, types, shapes and sizes of a call against the model's configuration.
2. `prepare` makes arrays of the payload: views, but for BYTES, whose elements become objects. The program may refuse
   their values.
3. `run` gives the program a batch and checks the outputs; `workers.strategies.named_outputs` takes the outputs to
   the requests.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ipc.catalog.model_config import ROW_COST
from ipc.errors import InvalidInput, UnexpectedOutput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES
from ipc.wire.messages import InferCall, Region, TensorInput
from workers.adapters.base import Prepared
from workers.adapters.shared.named_tensors import (
    TORCH_TYPES,
    Array,
    NamedBatch,
    NamedInputs,
    Signature,
    TensorFacts,
)
from workers.adapters.shared.program import ProgramAdapter
from workers.inputs import Payload
from workers.operations.items import NamedOutput, Results, ResultTensor, checked

EARLY_NBYTES = 64 << 10
"""A result of a known size gets its place before it is computed only when it is larger: small ones need no room."""
_INSTANT_NBYTES = 16 << 10
"""Bytes of texts that are taken apart in well under a millisecond."""


class Infer:
    """Results of a known size have a place beforehand; those that only the program tells are placed afterwards."""

    name = "infer"
    itemized = False
    refuses = True
    on_device = True

    def check(self, adapter: ProgramAdapter, call: InferCall) -> None:
        """Raise `InvalidInput` for what the configuration does not allow."""
        # PERF: clients send the same call again and again, only with other bytes. This comparison runs in C.
        # NOTE: without parameters, which are not checked: a program may have put an array into those of a past call.
        checked = call.inputs, call.outputs, call.rows
        if checked != adapter.allowed:
            self._check(adapter, call)
            adapter.allowed = checked

    def _check(self, adapter: ProgramAdapter, call: InferCall) -> None:
        signature = adapter.signature
        if call.rows < 1 or call.rows > signature.max_rows:
            raise InvalidInput(
                f"a request must have 1 to {signature.max_rows} rows (max_batch_size), this one has {call.rows}"
            )
        given = set()
        for tensor in call.inputs:
            facts = signature.inputs.get(tensor.name)
            if facts is None or tensor.name in given:
                raise InvalidInput(f"unexpected input {tensor.name[:200]!a}")
            if tensor.datatype != facts.datatype:
                raise InvalidInput(
                    f"input {tensor.name!a}: expected {facts.datatype}, got {tensor.datatype[:32]!a}"
                )
            facts.check_input(tensor.shape, call.rows, tensor.nbytes)
            if tensor.region is not None:
                _check_aligned(f"input {facts.name!a}", tensor.region, facts)
            given.add(tensor.name)
        datatypes.check_counts(
            (f"input {tensor.name!a}", math.prod(tensor.shape))
            for tensor in call.inputs
            if tensor.datatype == BYTES
        )
        if not signature.required <= given:
            raise InvalidInput(f"inputs are missing: {sorted(signature.required - given)}")
        names = {output.name for output in call.outputs}
        if len(names) != len(call.outputs) or not names <= signature.outputs.keys():
            raise InvalidInput(f"unexpected outputs: {[output.name[:200] for output in call.outputs]!a}")
        for output in call.outputs:
            if output.region is None:
                continue
            _check_aligned(f"output {output.name!a}", output.region, signature.outputs[output.name])
            if adapter.streams:
                raise InvalidInput(
                    f"output {output.name!a}: the responses of a decoupled model cannot be written to shared memory, "
                    "where each would lie over the one before"
                )

    def group(self, call: InferCall) -> Hashable:
        """Calls with the same inputs, in shapes that differ in the rows only, have equal groups."""
        return tuple([(tensor.name, *tensor.shape[1:]) for tensor in call.inputs])

    def needs_prepared(self, call: InferCall) -> bool:
        """The size of a result is known from the call, or not before it is computed."""
        return False

    def instant(self, call: InferCall) -> bool:
        """Whether preparing only makes views, or takes short texts apart."""
        texts_nbytes = 0
        for tensor in call.inputs:
            if tensor.region is not None:
                return False
            if tensor.datatype == BYTES:
                texts_nbytes += tensor.nbytes
        for output in call.outputs:
            if output.region is not None:
                return False
        return texts_nbytes <= _INSTANT_NBYTES

    def layout(
        self, adapter: ProgramAdapter, call: InferCall, prepared: Sequence[Prepared]
    ) -> list[ResultTensor]:
        """Raw bytes of the outputs, if all have a known size and they are large together; none of a stream."""
        if adapter.streams:
            return []
        parts = []
        for output in call.outputs:
            nbytes = adapter.signature.outputs[output.name].row_nbytes
            if nbytes is None and output.region is None:
                return []
            if nbytes is not None and output.region is None:
                parts.append(ResultTensor(output.name, "uint8", (nbytes * call.rows,)))
        return parts if sum([part.shape[0] for part in parts]) > EARLY_NBYTES else []

    def prepare(
        self, adapter: ProgramAdapter, call: InferCall, start: int, stop: int, payload: Payload
    ) -> list[Prepared]:
        """The arrays of the request, in the shapes of the program and the order of the configuration."""
        signature = adapter.signature
        arrays = {tensor.name: _array(tensor, signature, payload) for tensor in call.inputs}
        if len(arrays) > 1:
            arrays = {name: arrays[name] for name in signature.inputs if name in arrays}
        adapter.refuse_arrays(arrays)
        names = [output.name for output in call.outputs]
        inputs = NamedInputs(
            arrays, call.rows, names, call.parameters, call.step, payload.targets(call.outputs)
        )
        return [Prepared(inputs, ROW_COST * call.rows)]

    def run(self, adapter: ProgramAdapter, batch: NamedBatch, call: InferCall) -> Results:
        """Run the program once. Raises `UnexpectedOutput` for a result that the configuration forbids."""
        tensors = adapter.infer(batch)
        rows = batch.rows if adapter.signature.batches else None
        outputs = adapter.signature.outputs
        return Results(named={name: checked(outputs[name], tensors, rows) for name in batch.outputs})

    def stream(self, adapter: ProgramAdapter, batch: NamedBatch) -> Iterator[Any]:
        """The steps of one request."""
        return iter(adapter.stream(batch))

    def part(self, adapter: ProgramAdapter, batch: NamedBatch, found: object) -> dict[str, NamedOutput]:
        """The outputs of one step. Raises `UnexpectedOutput` for what the configuration forbids."""
        if not isinstance(found, Mapping):
            raise UnexpectedOutput(f"the model gave {type(found).__name__!a}, not a dictionary of outputs")
        rows = batch.rows if adapter.signature.batches else None
        return {name: checked(adapter.signature.outputs[name], found, rows) for name in batch.outputs}


def _array(tensor: TensorInput, signature: Signature, payload: Payload) -> Array:
    facts, raw = signature.inputs[tensor.name], payload.read(tensor)
    shape = tuple(facts.to_program(tensor.shape))
    if isinstance(raw, torch.Tensor):
        return _device_tensor(facts, raw, shape)
    if not facts.itemsize:
        return _texts(facts, raw, shape)
    return np.ndarray(shape, facts.dtype, raw)


def _check_aligned(where: str, region: Region, facts: TensorFacts) -> None:
    """Memory of a device is used in place, so elements in it must lie at multiples of their size."""
    if region.kind == "cuda" and facts.itemsize and region.offset % facts.itemsize:
        raise InvalidInput(
            f"{where}: offset {region.offset} in its CUDA memory region is no multiple of the {facts.itemsize} bytes "
            f"of an element of {facts.datatype}"
        )


def _device_tensor(facts: TensorFacts, raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if not facts.itemsize:
        raise InvalidInput(f"input {facts.name!a}: BYTES cannot be in CUDA memory")
    return raw.view(TORCH_TYPES[facts.dtype.name]).reshape(shape)


def _texts(facts: TensorFacts, raw: memoryview, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of BYTES as an array of `bytes`."""
    count = math.prod(shape)
    if count > len(raw) // datatypes.PREFIX_NBYTES:
        raise InvalidInput(f"input {facts.name!a}: {len(raw)} bytes cannot hold {count} elements")
    return datatypes.objects(raw, count, f"input {facts.name!a}").reshape(shape)
