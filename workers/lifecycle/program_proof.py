"""Samples that a program of named tensors runs once it was loaded: they warm it up and give its fingerprint.

1. Samples of a warm-up must run; zeros, which are taken where there are none, need not suit the program. What the
   program makes of zeros has to be what its configuration says, unless it has optional inputs: zeros leave them out,
   and outputs may depend on them.
2. A sample goes the way of a request and runs twice. Values that the second run does not give again (a clock, a draw)
   are left out of the fingerprint. Values need not be finite. Of a stream only the first part is run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ipc.errors import UnexpectedOutput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES
from ipc.wire.messages import InferCall, TensorInput, TensorOutput
from workers import foreign, operations
from workers.adapters.base import Pause
from workers.adapters.shared.named_tensors import NamedBatch, host_array
from workers.adapters.shared.program import ProgramAdapter, Sample
from workers.device import oom
from workers.inputs import Payload
from workers.operations.infer import Infer
from workers.operations.results import NamedOutput

log = logging.getLogger(__name__)

VALUES = 8
"""Values of each output that go into the fingerprint."""
_INFER = Infer()


def prove(adapter: ProgramAdapter, model: str) -> dict[str, list[float]]:
    """Run the samples on the device thread; returns the values of the fingerprint.

    Raises what a sample raised that must run; what zeros raise only when memory or the device has failed, and
    `UnexpectedOutput` of a program without optional inputs.
    """
    values: dict[str, list[float]] = {}
    has_optional = any(tensor.optional for tensor in adapter.config.inputs)
    for number, sample in enumerate(adapter.samples()):
        try:
            first, again = foreign.ask(_run, adapter, sample), foreign.ask(_run, adapter, sample)
        except Exception as error:
            refused = isinstance(error, UnexpectedOutput) and not has_optional
            if adapter.samples_must_run or refused or oom.is_out_of_memory(error) or oom.context_is_broken():
                raise
            log.warning("model %s does not take zeros: %s", model, error)
            continue
        same = {name: found for name, found in first.items() if found == again[name]}
        values.update({f"infer.{number}.{name}": found for name, found in same.items()})
    return values


def _run(adapter: ProgramAdapter, sample: Sample) -> dict[str, list[float]]:
    found = outputs_of(adapter, [sample])
    return {name: _values(array) for name, array in found.items() if array.dtype.kind != "O"}


def outputs_of(adapter: ProgramAdapter, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """All outputs of one batch with a request for each sample, as copies; of a stream those of the first part."""
    prepared, call = [], InferCall([], [])
    for sample in samples:
        call, payload = call_of(adapter, sample)
        operations.check(adapter, call)
        prepared += _INFER.prepare(adapter, call, 0, 1, Payload(memoryview(payload)))
    batch = adapter.collate(prepared)
    named = _first_part(adapter, batch) if adapter.streams else _INFER.run(adapter, batch, call).named
    return {name: host_array(output.values).copy() for name, output in named.items()}


def _first_part(adapter: ProgramAdapter, batch: NamedBatch) -> Mapping[str, NamedOutput]:
    """What the first step of a stream gives, which may have no end."""
    steps = _INFER.stream(adapter, batch)
    try:
        for found in steps:
            if isinstance(found, Pause):
                # The model waits for something before its first response: there is nothing to compare yet.
                return {}
            return _INFER.part(adapter, batch, found)
    finally:
        if (close := getattr(steps, "close", None)) is not None:
            close()
    return {}


def call_of(adapter: ProgramAdapter, sample: Mapping[str, np.ndarray]) -> tuple[InferCall, bytes]:
    """The call, and its payload, that a frontend would send for these arrays, all outputs wanted."""
    signature = adapter.signature
    inputs: list[TensorInput] = []
    payload = b""
    for name, array in sample.items():
        datatype = signature.inputs[name].datatype
        raw = datatypes.join(array.flat) if datatype == BYTES else array.tobytes()
        inputs.append(TensorInput(name, datatype, list(array.shape), len(payload), len(raw)))
        payload += raw
    rows = inputs[0].shape[0] if signature.batches and inputs else 1
    return InferCall(inputs, [TensorOutput(name) for name in signature.outputs], rows=rows), payload


def _values(array: np.ndarray) -> list[float]:
    return [float(x) for x in np.nan_to_num(array.reshape(-1)[:VALUES].astype(np.float64))]
