"""Where results are written: a block of the arena, or private bytes if the results are small.

1. `plan_output` refuses a result that could never fit, and says the sizes.
2. `reserve_output` makes room before anything is computed. A job that finds no room waits until a lease ends.
3. `write_results` copies rows from the device straight into their final place.
4. Loose values, whose size the model decides, are kept aside and travel in a frame of their own (`loose_frame`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from ipc.errors import InvalidInput, ShmExhausted
from ipc.memory import tensors
from ipc.memory.arena import LeaseTable
from ipc.wire.messages import TensorRef
from workers.operations.items import Results, ResultTensor
from workers.scheduling.job import Job, Output, Piece


def plan_output(job: Job, parts: Sequence[ResultTensor], leases: LeaseTable) -> None:
    """Note where the tensors of `job` will lie in its output.

    Raises `InvalidInput` when the result is larger than the whole arena.
    """
    if not parts:
        return
    job.refs, job.result_nbytes = tensors.layout((part.name, part.dtype, part.shape) for part in parts)
    job.starts = {part.name: [0, *accumulate(part.rows)] for part in parts if part.rows is not None}
    check_result_size(job.result_nbytes, leases)


def check_result_size(nbytes: int, leases: LeaseTable) -> None:
    """Raise `InvalidInput` for a result that is larger than the whole arena."""
    if nbytes > leases.capacity_nbytes:
        sizes = f"the result needs {nbytes} bytes, arena.bytes allows {leases.capacity_nbytes}"
        raise InvalidInput(f"items: {sizes}")


def reserve_output(job: Job, leases: LeaseTable, inline_nbytes: int) -> Output | None:
    """Output space for a planned `job`; None when the arena has no room now."""
    block = None
    if job.result_nbytes <= inline_nbytes:
        buffer = memoryview(bytearray(job.result_nbytes))
    else:
        block = leases.reserve(job.result_nbytes)
        if block is None:
            return None
        buffer = leases.data(block)
    return Output(block, buffer, {ref.name: tensors.view(buffer, ref) for ref in job.refs})


def arena_full(retry_after_s: float) -> ShmExhausted:
    """The error of a job whose deadline passed while the job waited for room."""
    return ShmExhausted("shared memory for results is full", retry_after_s=retry_after_s)


def runs(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces that are consecutive items of one job."""
    spans: list[tuple[int, int]] = []
    for at, piece in enumerate(pieces):
        if spans and pieces[at - 1].job is piece.job and pieces[at - 1].index + 1 == piece.index:
            spans[-1] = (spans[-1][0], at + 1)
        else:
            spans.append((at, at + 1))
    return spans


def write_results(pieces: Sequence[Piece], results: Results) -> None:
    """Copy what belongs to each piece to its place; device tensors are copied once, into place."""
    spans = runs(pieces)
    ends = [0, *accumulate(piece.prepared.rows for piece in pieces)]
    for name, tensor in results.rows.items():
        for start, stop in spans:
            piece = pieces[start]
            if piece.job.output is not None:
                place = piece.job.output.arrays[name][piece.index : piece.index + stop - start]
                _copy(place, tensor[start:stop])
    for name, tensor in results.ragged.items():
        for start, stop in spans:
            piece, last = pieces[start], pieces[stop - 1]
            if piece.job.output is not None:
                starts = piece.job.starts[name]
                place = piece.job.output.arrays[name][starts[piece.index] : starts[last.index + 1]]
                _copy(place, tensor[ends[start] : ends[stop]])
    for name, arrays in results.loose.items():
        for piece, array in zip(pieces, arrays, strict=True):
            piece.job.loose.setdefault(name, {})[piece.index] = array
    if any(tensor.is_cuda for tensor in (*results.rows.values(), *results.ragged.values())):
        torch.cuda.synchronize()


def _copy(place: np.ndarray, values: torch.Tensor) -> None:
    if values.is_cuda:
        torch.from_numpy(place).copy_(values, non_blocking=True)
    else:
        np.copyto(place, values.numpy())


def rows_of(job: Job) -> dict[str, list[int]]:
    """Rows per item of the ragged and the loose tensors of a job."""
    counts = {name: np.diff(starts).tolist() for name, starts in job.starts.items()}
    for name, arrays in job.loose.items():
        counts[name] = [len(arrays[index]) if index in arrays else 0 for index in range(len(job.prepared))]
    return counts


def loose_frame(job: Job) -> tuple[list[TensorRef], bytes | None]:
    """References and bytes of the frame beside the block: inline tensors first, then the loose ones by item."""
    inline = job.output.buffer if job.output is not None and job.output.block is None else b""
    if not job.loose:
        return [], bytes(inline) if job.output is None or job.output.block is None else None
    joined = {
        name: np.concatenate([arrays[index] for index in sorted(arrays)])
        for name, arrays in sorted(job.loose.items())
    }
    refs, nbytes = tensors.layout((name, array.dtype.name, array.shape) for name, array in joined.items())
    head = -(-len(inline) // tensors.ALIGNMENT) * tensors.ALIGNMENT
    frame = bytearray(head + nbytes)
    frame[: len(inline)] = inline
    placed = [TensorRef(ref.name, ref.dtype, ref.shape, head + ref.start) for ref in refs]
    for ref in placed:
        tensors.view(memoryview(frame), ref)[...] = joined[ref.name]
    return placed, bytes(frame)
