"""Where results are written: a block of the arena, or private bytes for small ones.

1. `reserve` makes room before anything is computed. No room now: the job is parked and tried again when a lease ends.
2. `write` copies rows from the device straight into their final place.
3. A result that could never fit is refused with the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ipc import tensors
from ipc.errors import InvalidInput, ShmExhausted
from ipc.leases import LeaseTable
from workers.job import Job, Output, Piece

Parts = Sequence[tuple[str, str, tuple[int, ...]]]


def plan(job: Job, parts: Parts, leases: LeaseTable) -> None:
    """Note where the tensors (name, dtype, shape) of `job` will lie in its output.

    Raises `InvalidInput` when the result is larger than the whole arena.
    """
    job.refs, job.result_nbytes = tensors.layout(parts)
    if job.result_nbytes > leases.capacity_nbytes:
        sizes = f"the result needs {job.result_nbytes} bytes, arena.bytes allows {leases.capacity_nbytes}"
        raise InvalidInput(f"items: {sizes}")


def reserve(job: Job, leases: LeaseTable, inline_nbytes: int) -> bool:
    """Give a planned `job` its output space; False when the arena has no room now."""
    block = None
    if job.result_nbytes <= inline_nbytes:
        buffer = memoryview(bytearray(job.result_nbytes))
    else:
        block = leases.reserve(job.result_nbytes)
        if block is None:
            return False
        buffer = leases.data(block)
    job.output = Output(block, buffer, {ref.name: tensors.view(buffer, ref) for ref in job.refs})
    return True


def exhausted(retry_after_s: float) -> ShmExhausted:
    """The error of a job whose deadline passed while it was parked."""
    return ShmExhausted("shared memory for results is full", retry_after_s=retry_after_s)


def runs(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """(start, stop) of consecutive pieces that are consecutive items of one job."""
    found: list[tuple[int, int]] = []
    for at, piece in enumerate(pieces):
        if found and pieces[at - 1].job is piece.job and pieces[at - 1].index + 1 == piece.index:
            found[-1] = (found[-1][0], at + 1)
        else:
            found.append((at, at + 1))
    return found


def write(pieces: Sequence[Piece], results: dict[str, torch.Tensor]) -> None:
    """Copy row i of every tensor to the place of piece i; device tensors are copied once, into place."""
    spans = runs(pieces)
    for name, tensor in results.items():
        rows = tensor.numpy() if tensor.device.type == "cpu" else None
        for start, stop in spans:
            piece = pieces[start]
            if piece.job.output is None:
                continue
            target = piece.job.output.arrays[name][piece.index : piece.index + stop - start]
            if rows is not None:
                np.copyto(target, rows[start:stop])
            else:
                torch.from_numpy(target).copy_(tensor[start:stop], non_blocking=True)
    if any(tensor.device.type == "cuda" for tensor in results.values()):
        torch.cuda.synchronize()


def finite_rows(results: dict[str, torch.Tensor]) -> list[bool]:
    """For each row, whether all its values are finite in all tensors."""
    flags = [torch.isfinite(tensor).flatten(1).all(dim=1) for tensor in results.values()]
    return torch.stack(flags).all(dim=0).tolist() if flags else []
