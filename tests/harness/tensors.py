"""Infer calls with named arrays, and what comes back as arrays."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from frontend.engine.answer import Answer
from frontend.engine.local.client import Client
from ipc import deadline
from ipc.memory.datatypes import DATATYPES
from ipc.wire.messages import InferCall, TensorInput, TensorOutput, Work
from tests.harness.server import PATIENCE_S

Named = Mapping[str, tuple[str, np.ndarray]]
"""Arrays by name, with their datatypes; BYTES as arrays of `bytes`."""


def raw_of(array: np.ndarray) -> bytes:
    """The bytes of an array as they go over the wire, by the definition of the protocols."""
    if array.dtype.kind != "O":
        return array.tobytes()
    return b"".join(struct.pack("<I", len(element)) + element for element in array.reshape(-1))


def array_of(raw: bytes, datatype: str, shape: Sequence[int]) -> np.ndarray:
    """The array that raw bytes stand for."""
    if datatype != "BYTES":
        return np.frombuffer(raw, DATATYPES[datatype].array).reshape(shape)
    found, at = [], 0
    while at < len(raw):
        (nbytes,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + nbytes])
        at += 4 + nbytes
    array = np.empty(len(found), dtype=object)
    array[:] = found
    return array.reshape(shape)


def call_of(
    inputs: Named, outputs: Sequence[str], *, batches: bool = True, **facts: Any
) -> tuple[InferCall, bytes]:
    """A call and its payload, inputs one after another."""
    described, payload = [], b""
    for name, (datatype, array) in inputs.items():
        raw = raw_of(array)
        described.append(TensorInput(name, datatype, list(array.shape), len(payload), len(raw)))
        payload += raw
    first = next(iter(inputs.values()))[1] if inputs else np.zeros(1)
    rows = first.shape[0] if batches else 1
    return InferCall(described, [TensorOutput(name) for name in outputs], rows=rows, **facts), payload


def request_of(
    model: str, call: InferCall, payload: Any, timeout_s: float = PATIENCE_S, **more: Any
) -> tuple[Work, Any]:
    """A request that may take so long, and its payload; `more` are other fields of `Work`."""
    return Work(model, call, deadline.after(timeout_s), 16 * max(call.rows, 1), "req", **more), payload


def read(reply: Answer) -> dict[str, np.ndarray]:
    """Copies of all outputs; ends the lease."""
    with reply:
        found = {
            info.name: array_of(bytes(reply.raw(info.name)), info.datatype, info.shape)
            for info in reply.infos
        }
        reply.check()
        return found


async def infer(
    client: Client, model: str, inputs: Named, outputs: Sequence[str], **facts: Any
) -> dict[str, np.ndarray]:
    """One call whose inputs travel in the message."""
    call, payload = call_of(inputs, outputs, **facts)
    return read(await client.call(*request_of(model, call, payload)))


async def infer_large(
    client: Client, model: str, inputs: Named, outputs: Sequence[str], **facts: Any
) -> dict[str, np.ndarray]:
    """One call whose inputs lie in a block of the client's arena."""
    call, payload = call_of(inputs, outputs, **facts)
    block = await client.inputs.reserve(len(payload))
    assert block is not None
    with block:
        block.buffer[:] = payload
        return read(await client.call(*request_of(model, call, block)))
