"""Takes the outputs of a batch of named tensors to its requests.

The rows of each request are cut out and copied once: into the block that was reserved for them, into a client's region,
or, when their size is known only now, into a block or frame that is made now. The device thread never waits for room: a
result that finds none fails with `SHM_EXHAUSTED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ipc.errors import PenstockError, UnexpectedOutput
from ipc.memory import copies, datatypes, tensors
from ipc.memory.datatypes import BYTES
from ipc.wire.messages import TensorInfo, TensorRef
from workers.adapters.base import ItemFailure
from workers.adapters.shared.named_tensors import TensorFacts, host_array
from workers.inputs import OpenRegion
from workers.operations.items import NamedOutput
from workers.scheduling.job import Output, Piece
from workers.scheduling.job_table import JobTable, PlacedPart

Raw = bytes | np.ndarray | torch.Tensor
"""An output of one request before it is placed: bytes, or values whose bytes are wanted."""


class Placer:
    """Writes outputs of named tensors. Device thread only."""

    def __init__(self, table: JobTable, inline_nbytes: int) -> None:
        """Results up to `inline_nbytes` travel in a frame."""
        self._table, self._inline_nbytes = table, inline_nbytes

    def write(self, pieces: Sequence[Piece], named: Mapping[str, NamedOutput]) -> dict[int, ItemFailure]:
        """Give every request its rows; returns what failed, by place in the batch."""
        failures: dict[int, ItemFailure] = {}
        start, on_device = 0, False
        for place, piece in enumerate(pieces):
            slot = piece.prepared.slot
            start = start if slot is None else slot
            stop = start + piece.prepared.payload.rows
            try:
                on_device |= self._write_one(piece, named, slice(start, stop))
            except PenstockError as error:
                failures[place] = ItemFailure(error.code, error.message)
            start = stop
        if on_device:
            torch.cuda.synchronize()
        return failures

    def _write_one(self, piece: Piece, named: Mapping[str, NamedOutput], rows: slice) -> bool:
        """Write the outputs of one request; whether copies from the device are still under way."""
        job, request = piece.job, piece.prepared.payload
        infos: list[TensorInfo] = []
        left: list[tuple[str, Raw]] = []
        on_device = False
        for name in request.outputs:
            info, raw = _cut(name, named[name], rows)
            infos.append(info)
            if name in request.targets:
                on_device |= _write_region(request.targets[name], raw)
            else:
                left.append((name, raw))
        job.infos = infos
        if job.output is not None and job.output.arrays:
            for name, raw in left:
                _copy(job.output.arrays[name], raw)
        else:
            self._table.replace(job, *self._placed(left))
        return on_device or any(isinstance(raw, torch.Tensor) for _, raw in left)

    def part(self, piece: Piece, named: Mapping[str, NamedOutput]) -> PlacedPart:
        """One part of a streamed answer of a request that runs alone. Raises `ShmExhausted` when there is no room."""
        request = piece.prepared.payload
        cuts = [_cut(name, named[name], slice(0, request.rows)) for name in request.outputs]
        raws = [(info.name, raw) for info, raw in cuts]
        refs, output = self._placed(raws)
        if output.block is not None and any(isinstance(raw, torch.Tensor) for _, raw in raws):
            torch.cuda.synchronize()
        return PlacedPart([info for info, _ in cuts], refs, output)

    def _placed(self, raws: Sequence[tuple[str, Raw]]) -> tuple[list[TensorRef], Output]:
        """The outputs of a request, written to room that is reserved now."""
        refs, nbytes = _lay_out(raws)
        if nbytes <= self._inline_nbytes:
            copies.count("place", nbytes)
            return refs, Output(None, _frame(refs, raws, nbytes), {})
        output = self._table.reserve(nbytes)
        try:
            for ref, (_, raw) in zip(refs, raws, strict=True):
                _copy(tensors.view(output.buffer, ref), raw)
        except BaseException:
            self._table.give_back(output)
            raise
        return refs, output


def _cut(name: str, output: NamedOutput, rows: slice) -> tuple[TensorInfo, Raw]:
    """The rows of one request."""
    values = output.values
    if output.batches and len(values) != rows.stop - rows.start:
        values = values[rows]
    shape = [rows.stop - rows.start, *output.rest] if output.batches else output.rest
    raw = _raw(output.facts, values)
    return TensorInfo(name, output.facts.datatype, shape, _nbytes(raw)), raw


def _raw(facts: TensorFacts, values: np.ndarray | torch.Tensor) -> Raw:
    if isinstance(values, torch.Tensor) or facts.datatype != BYTES:
        return values
    return datatypes.join([_text(facts, value) for value in values.flat], f"output {facts.name!a}")


def _text(facts: TensorFacts, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise UnexpectedOutput(f"output {facts.name!a}: the model gave {type(value).__name__!a}, not bytes")


def _nbytes(raw: Raw) -> int:
    return len(raw) if isinstance(raw, bytes) else raw.nbytes


def _lay_out(raws: Sequence[tuple[str, Raw]]) -> tuple[list[TensorRef], int]:
    refs, at = [], 0
    for name, raw in raws:
        at = -(-at // tensors.ALIGNMENT) * tensors.ALIGNMENT
        nbytes = _nbytes(raw)
        refs.append(TensorRef(name, "uint8", [nbytes], at))
        at += nbytes
    return refs, at


def _frame(refs: Sequence[TensorRef], raws: Sequence[tuple[str, Raw]], nbytes: int) -> bytes:
    """The outputs of a request one after another in private bytes."""
    parts: list[bytes] = []
    at = 0
    for ref, (_, raw) in zip(refs, raws, strict=True):
        if ref.start > at:
            parts.append(bytes(ref.start - at))
        parts.append(raw if isinstance(raw, bytes) else host_array(raw).tobytes())
        at = ref.start + ref.shape[0]
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _copy(place: np.ndarray, raw: Raw) -> None:
    """Copy a tensor to `place`, uint8 [nbytes]. A copy from the device is only begun here."""
    if not place.nbytes:
        return
    copies.count("place", place.nbytes)
    if isinstance(raw, bytes):
        place[:] = np.frombuffer(raw, np.uint8)
    elif isinstance(raw, torch.Tensor):
        torch.from_numpy(place).view(raw.dtype).view(raw.shape).copy_(raw, non_blocking=True)
    else:
        np.copyto(place.view(raw.dtype).reshape(raw.shape), raw)


def _write_region(region: OpenRegion, raw: Raw) -> bool:
    """Write an output to the start of a client's region; whether a copy on the device is under way."""
    if region.on_device and isinstance(raw, torch.Tensor) and raw.nbytes <= region.nbytes:
        copies.count("region", raw.nbytes)
        region.tensor()[: raw.nbytes].view(raw.dtype).view(raw.shape).copy_(raw, non_blocking=True)
        return True
    region.write(_host_bytes(raw))
    return False


def _host_bytes(raw: Raw) -> memoryview:
    """The bytes of an output, C-contiguous on the host."""
    if isinstance(raw, bytes):
        return memoryview(raw)
    array = np.ascontiguousarray(host_array(raw))
    return array.reshape(array.size).view(np.uint8).data
