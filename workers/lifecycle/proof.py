"""Canned inferences: calls that a model must answer before it counts as loaded.

1. For each operation that the model offers a small call is made: a text, an image of a few colours, or both.
2. A family that needs labels or a question refuses the call (`InvalidInput`), and the next form of the call is tried.
   Any other error fails the load, and so does a model that takes none of the calls.
3. Each step of a text is a piece of its own on the device thread, so that other models are served in between.
4. Every value must be finite. The first values of each result are the model's fingerprint.

A program of named tensors runs samples (`prove_program`), which warm the program up and give its fingerprint:

1. Samples of a warm-up must run. Without a warm-up zeros are taken, which need not suit the program.
2. Outputs for zeros have to be as the configuration states. A program with optional inputs is exempt: zeros leave
   these inputs out, and outputs may depend on them.
3. A sample goes the way of a request and runs twice. Values that differ in the second run (a clock, a draw) are left
   out of the fingerprint. Values need not be finite. Of a stream only the first part is run.
"""

from __future__ import annotations

import itertools
import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ipc.catalog.entries import ModelEntry
from ipc.errors import InferenceFailed, InvalidInput, UnexpectedOutput
from ipc.memory import datatypes
from ipc.memory.datatypes import BYTES
from ipc.wire import extraction
from ipc.wire.messages import (
    Call,
    EncodeCall,
    Ending,
    ExtractCall,
    GenerateCall,
    InferCall,
    InputItem,
    Sampling,
    ScoreCall,
    TensorInput,
    TensorOutput,
)
from workers import foreign, operations
from workers.adapters.base import Adapter, ItemFailure, Pause, Prepared
from workers.adapters.shared.named_tensors import NamedBatch, host_array
from workers.adapters.shared.program import ProgramAdapter, Sample
from workers.device import oom
from workers.device.findings import Values
from workers.inputs import NOTHING, Payload
from workers.lifecycle.fingerprint import FINDINGS
from workers.operations.infer import Infer
from workers.operations.items import Generate, NamedOutput, Results

log = logging.getLogger(__name__)

Run = Callable[[Callable[[], Any]], Any]
"""Executes a function on the device thread."""

_INFER = Infer()
VALUES = 8
"""Values of each result that go into the fingerprint."""
_SIDE = 64
_QUESTION = "What is this?"
_LABELS = ["person", "place"]
_PAGE = {"words": ["two", "words"], "boxes": [[0, 0, 32, 32], [32, 0, 32, 32]]}
"""Words of a page, for families that answer questions about them."""
_SHORTEST = 8
"""Tokens that a family which writes text may write in a proof: no request is served meanwhile."""


def prove(adapter: Adapter, entry: ModelEntry, lora: str = "", run: Run = lambda work: work()) -> Values:
    """Run the canned inferences; returns the fingerprint.

    `run` executes a function on the device thread, which serves others before the next one; without `run` this is the
    device thread. With `lora` text is generated with this LoRA adapter, which is active anyway for all other
    inferences.

    Raises the errors of the model, and `InferenceFailed` for values that are not finite, or when no operation takes
    any of the canned inputs.
    """
    if isinstance(adapter, ProgramAdapter):
        return cast("Values", run(lambda: prove_program(adapter, entry.id)))
    values: Values = {}
    proven = 0
    for operation in offered(adapter, entry):
        outputs = _attempt(adapter, entry, operation, lora, run)
        if outputs is None:
            log.warning("model %s: no canned input of ours suits its %s", entry.id, operation)
            continue
        proven += 1
        values.update({f"{operation}.{name}": part for name, part in outputs.items()})
    if not proven and adapter.spec.needs_proof:
        raise InferenceFailed("the model takes none of the canned inputs and is not proven to work")
    return values


def offered(adapter: Adapter, entry: ModelEntry) -> list[str]:
    """Operations that both the family and the catalog entry name; the family's first where the entry names none."""
    named = {
        "encode": bool(set(entry.encode_outputs) & set(adapter.dims)),
        "score": "score" in entry.outputs,
        "extract": "json" in entry.outputs,
        "generate": "chat" in entry.outputs,
    }
    offered = [name for name in adapter.spec.operations if named.get(name)]
    return offered or list(adapter.spec.operations[:1])


def _attempt(adapter: Adapter, entry: ModelEntry, operation: str, lora: str, run: Run) -> Values | None:
    """The first values of the first canned call that the adapter takes, None when it takes none."""
    for call in _calls(adapter, entry, operation, lora):
        try:
            operations.check(adapter, call)
            [prepared] = operations.operation_of(call).prepare(adapter, call, 0, 1, NOTHING)
        except InvalidInput:
            continue
        if isinstance(prepared, Prepared):
            return _values_of(adapter, call, prepared, run)
        if prepared.code != InvalidInput.code:
            raise InferenceFailed(f"the canned inference failed: {prepared.message}")
    return None


def _calls(adapter: Adapter, entry: ModelEntry, operation: str, lora: str) -> Iterator[Call]:
    if operation == "generate":
        # NOTE: the first token runs all layers of an adapter, and others wait meanwhile.
        ending = Ending(max_tokens=1 if lora else _SHORTEST, ignore_eos=True)
        sampling = Sampling(logprobs=0)
        yield GenerateCall(text=entry.proof, ending=ending, sampling=sampling, splits=False, lora=lora)
        return
    options = {**entry.runtime, **({"max_new_tokens": _SHORTEST} if _writes(adapter) else {})}
    texts = [InputItem(entry.proof)] if "text" in entry.inputs else []
    images = [InputItem(images=[canned_image()], metadata=_PAGE)] if "image" in entry.inputs else []
    both = [InputItem(entry.proof, images=[canned_image()])] if texts and images else []
    for item, question in itertools.product([*texts, *images, *both], (None, _QUESTION)):
        if operation == "encode":
            yield EncodeCall([item], sorted(adapter.dims), question, options=options)
        elif operation == "score":
            yield ScoreCall([item], InputItem(entry.proof), question, options=options)
        else:
            for labels in (_LABELS, []):
                yield ExtractCall([item], labels, None, question, options=options)


def _writes(adapter: Adapter) -> bool:
    return "max_new_tokens" in adapter.spec.options


def _values_of(adapter: Adapter, call: Call, prepared: Prepared, run: Run) -> Values:
    operation = operations.operation_of(call)
    batch = run(lambda: adapter.collate([prepared]))
    if isinstance(operation, Generate):
        # NOTE: all steps of a text take a second on a CPU, and whoever asks another model meanwhile would wait so long.
        steps = operation.steps(adapter, batch)
        results = operation.told(*iter(lambda: run(lambda: next(steps, None)), None))
    else:
        results = run(lambda: operation.run(adapter, batch, call))
    if results.failures:
        failed: ItemFailure = results.failures[0]
        raise InferenceFailed(f"the canned inference failed: {failed.message}")
    if not all(results.finite([prepared.rows])):
        raise InferenceFailed("the canned inference did not give finite values")
    return _values(results)


def _values(results: Results) -> Values:
    """The first values of each tensor, in the order of their names; of findings and terms the highest first."""
    values: Values = {}
    for tensors in (results.rows, results.ragged):
        for name in sorted(tensors):
            values[name] = [float(x) for x in tensors[name][:1].flatten()[:VALUES].float().cpu()]
    for name in sorted(results.loose):
        array = results.loose[name][0]
        if name == FINDINGS:
            values[name] = _scores(array)
        elif array.dtype.kind == "f":
            values[name] = [float(x) for x in np.sort(array)[::-1][:VALUES]]
    return values


def _scores(packed: np.ndarray) -> list[float]:
    findings = extraction.unpack(packed.tobytes())
    scores = [entity.score for entity in findings.entities]
    scores += [relation.score for relation in findings.relations]
    scores += [each.score for each in findings.classifications]
    scores += [each.score for each in findings.objects]
    return sorted(scores, reverse=True)[:VALUES]


def canned_image() -> bytes:
    """A PNG of 64 x 64 pixels, RGB, with a different colour in each quarter."""
    colours = (b"\xd0\x40\x30", b"\x30\x90\x40", b"\x30\x50\xc0", b"\xe0\xe0\xd0")
    half = _SIDE // 2
    rows = [colours[2 * (y >= half)] * half + colours[2 * (y >= half) + 1] * half for y in range(_SIDE)]
    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def prove_program(adapter: ProgramAdapter, model: str) -> dict[str, list[float]]:
    """Run the samples on the device thread; returns the values of the fingerprint.

    Raises the error of a sample that must run. Of zeros only these errors are raised: lack of memory, a failed device,
    and `UnexpectedOutput` of a program without optional inputs.
    """
    values: dict[str, list[float]] = {}
    has_optional = any(tensor.optional for tensor in adapter.config.inputs)
    for number, sample in enumerate(adapter.samples()):
        try:
            first, again = (
                foreign.ask(_run_program, adapter, sample),
                foreign.ask(_run_program, adapter, sample),
            )
        except Exception as error:
            refused = isinstance(error, UnexpectedOutput) and not has_optional
            if (
                adapter.samples_must_run
                or refused
                or oom.is_out_of_memory(error)
                or oom.context_is_broken(error)
            ):
                raise
            log.warning("model %s does not take zeros: %s", model, error)
            continue
        same = {name: output for name, output in first.items() if output == again[name]}
        values.update({f"infer.{number}.{name}": output for name, output in same.items()})
    return values


def _run_program(adapter: ProgramAdapter, sample: Sample) -> dict[str, list[float]]:
    outputs = outputs_of(adapter, [sample])
    return {name: _program_values(array) for name, array in outputs.items() if array.dtype.kind != "O"}


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
    """The outputs of the first step of a stream, which may have no end."""
    steps = _INFER.stream(adapter, batch)
    try:
        for step in steps:
            if isinstance(step, Pause):
                # The model waits for something before its first response: there is nothing to compare yet.
                return {}
            return _INFER.part(adapter, batch, step)
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


def _program_values(array: np.ndarray) -> list[float]:
    return [float(x) for x in np.nan_to_num(array.reshape(-1)[:VALUES].astype(np.float64))]
