"""Canned inferences: what a model must answer before it counts as loaded.

1. For each operation that the model offers a small call is made: a text, an image of a few colours, or both.
2. Families that want labels or a question say so by refusing (`InvalidInput`); the next form of the call is tried.
   Any other error fails the load, and so does a model that takes none of the calls.
3. Every value must be finite. The first values of each result are the model's fingerprint.
"""

from __future__ import annotations

import itertools
import logging
import struct
import zlib
from collections.abc import Iterator

import numpy as np

from ipc.catalog.entries import ModelEntry
from ipc.errors import InferenceFailed, InvalidInput
from ipc.wire import extraction
from ipc.wire.messages import (
    Call,
    EncodeCall,
    Ending,
    ExtractCall,
    GenerateCall,
    InputItem,
    Sampling,
    ScoreCall,
)
from workers import operations
from workers.adapters.base import Adapter, ItemFailure, Prepared
from workers.adapters.shared.program import ProgramAdapter
from workers.inputs import NOTHING
from workers.lifecycle import program_proof
from workers.lifecycle.fingerprint import FINDINGS
from workers.operations.results import Results

log = logging.getLogger(__name__)

VALUES = 8
"""Values of each result that go into the fingerprint."""
Values = dict[str, list[float]]
"""Values of a fingerprint by `operation.output`."""
_SIDE = 64
_QUESTION = "What is this?"
_LABELS = ["person", "place"]
_PAGE = {"words": ["two", "words"], "boxes": [[0, 0, 32, 32], [32, 0, 32, 32]]}
"""For families that answer questions about the words of a page; others do not look at it."""
_SHORTEST = 8
"""Tokens that a family which writes text may write here; the device serves nobody meanwhile."""


def prove(adapter: Adapter, entry: ModelEntry) -> Values:
    """Run the canned inferences on the device thread; returns the fingerprint.

    Raises whatever went wrong, and `InferenceFailed` when one gives values that are not finite or when no operation
    takes any of the canned inputs.
    """
    if isinstance(adapter, ProgramAdapter):
        return program_proof.prove(adapter, entry.id)
    values: Values = {}
    proven = 0
    for operation in offered(adapter, entry):
        found = _attempt(adapter, entry, operation)
        if found is None:
            log.warning("model %s: no canned input of ours suits its %s", entry.id, operation)
            continue
        proven += 1
        values.update({f"{operation}.{name}": part for name, part in found.items()})
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
    found = [name for name in adapter.spec.operations if named.get(name)]
    return found or list(adapter.spec.operations[:1])


def _attempt(adapter: Adapter, entry: ModelEntry, operation: str) -> Values | None:
    """The first values of the first canned call that the adapter takes, None when it takes none."""
    for call in _calls(adapter, entry, operation):
        try:
            operations.check(adapter, call)
            [prepared] = operations.operation_of(call).prepare(adapter, call, 0, 1, NOTHING)
        except InvalidInput:
            continue
        if isinstance(prepared, Prepared):
            return _run(adapter, call, prepared)
        if prepared.code != InvalidInput.code:
            raise InferenceFailed(f"the canned inference failed: {prepared.message}")
    return None


def _calls(adapter: Adapter, entry: ModelEntry, operation: str) -> Iterator[Call]:
    if operation == "generate":
        ending = Ending(max_tokens=_SHORTEST, ignore_eos=True)
        yield GenerateCall(text=entry.proof, ending=ending, sampling=Sampling(logprobs=0), splits=False)
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


def _run(adapter: Adapter, call: Call, prepared: Prepared) -> Values:
    results = operations.operation_of(call).run(adapter, adapter.collate([prepared]), call)
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
    found = extraction.unpack(packed.tobytes())
    scores = [entity.score for entity in found.entities]
    scores += [relation.score for relation in found.relations]
    scores += [each.score for each in found.classifications]
    scores += [each.score for each in found.objects]
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
