"""The numbers of a tensor in a GGUF file.

1. A tensor is read and turned into numbers in pieces, so a load holds a few pieces beside the model.
2. Blocks of the commonest types are turned here, in place, with the arithmetic of the package `gguf` in the same order:
   the numbers are the same bit for bit, in a fifth of the time.
3. The package turns blocks of all other types.
4. `Ahead` makes tensors in a thread, while the load still imports libraries.

In a block of 4 bits a byte holds two numbers: the low halves of a run of bytes come before the high halves.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ipc import extras
from workers.adapters.shared.quantized_linears import INT4, INT8, LEAST_STEP, QuantizedWeight
from workers.loading.gguf_file import GgufRefused, StoredTensor

PIECE_VALUES = 1 << 18
"""Numbers of a tensor that are made at a time."""
AS_STORED = {INT4: ("Q4_0", "Q4_1", "Q4_K"), INT8: ("Q8_0",)}
"""Blocks whose integers stay as they are in a kind of quantised layers."""
_BLOCK = 32
"""Numbers with the same scale in the blocks of `AS_STORED`."""
_HALF_NBYTES = 2
"""Of a scale in half precision."""
_K_SCALES_NBYTES = 12
"""Of the scales and least numbers of the 8 parts of a block of Q4_K, six bits each."""

Blocks = NDArray[np.uint8]
Numbers = NDArray[np.float32]


def read_tensor(stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a file as numbers [*shape]. Raises OSError for a file that is cut off meanwhile."""
    package = extras.require("gguf", "gguf")
    kind = package.GGMLQuantizationType[stored.kind]
    values, block_nbytes = package.GGML_QUANT_SIZES[kind]
    turn = _TURNS.get(stored.kind)
    whole = torch.empty(math.prod(stored.shape), dtype=dtype)
    step = max(1, PIECE_VALUES // values)
    with stored.file.open("rb", buffering=0) as stream:
        for first in range(0, stored.nbytes // block_nbytes, step):
            count = min(step, stored.nbytes // block_nbytes - first)
            data = _read(stream.fileno(), count * block_nbytes, stored.start + first * block_nbytes, stored)
            place = whole[first * values : (first + count) * values]
            if turn is None:
                # PERF: the package takes 16 rows at a time, so all blocks are one row.
                numbers = package.dequantize(data.reshape(1, -1), kind).reshape(-1)
            else:
                numbers = place.numpy() if dtype == torch.float32 else np.empty(count * values, np.float32)
                turn(data.reshape(count, block_nbytes), numbers.reshape(count, values))
            if turn is None or dtype != torch.float32:
                place.copy_(torch.from_numpy(numbers))
    return whole.reshape(stored.shape)


def checked(numbers: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Numbers or scales of a tensor, which are finite. Raises `GgufRefused` with the tensor and how many are not."""
    # PERF: the least and the most, as they need no memory.
    if numbers.numel() and not all(math.isfinite(float(end)) for end in torch.aminmax(numbers)):
        wrong, whole = int((~numbers.isfinite()).sum()), numbers.numel()
        reason = f"{stored.name} has {wrong} of {whole} numbers that are not finite"
        raise GgufRefused(f"{stored.file.name}: {reason}")
    return numbers


def read_runs(stored: StoredTensor) -> Iterator[torch.Tensor]:
    """A tensor [outer, inner] as runs of its rows, float32, each of `PIECE_VALUES` numbers or one row.

    Rows are whole blocks. Raises OSError for a file that is cut off meanwhile.
    """
    outer, inner = stored.shape
    row_nbytes, step = stored.nbytes // outer, max(1, PIECE_VALUES // inner)
    for first in range(0, outer, step):
        count = min(step, outer - first)
        start = stored.start + first * row_nbytes
        run = replace(stored, shape=(count, inner), start=start, nbytes=count * row_nbytes)
        yield read_tensor(run, torch.float32)


class Ahead:
    """Tensors of a model in float32, which a thread makes before the load asks for them.

    PERF: libraries and a tokenizer keep one core busy with Python; the numbers are made on another, mostly without the
    lock of the interpreter.
    """

    def __init__(self, tensors: Iterable[StoredTensor]) -> None:
        """The thread begins with the first of the `tensors`, and has the priority of the calling thread."""
        self._lock = threading.Lock()
        self._left = dict.fromkeys(tensors)
        self._made: dict[StoredTensor, Future[torch.Tensor]] = {}
        self._thread = threading.Thread(target=self._make_all, name="tensors-ahead", daemon=True)
        self._thread.start()

    def take(self, stored: StoredTensor) -> torch.Tensor:
        """A tensor as numbers, for the only time; made here unless the thread has begun. Raises as `read_tensor`."""
        with self._lock:
            self._left.pop(stored, None)
            future = self._made.pop(stored, None)
        return read_tensor(stored, torch.float32) if future is None else future.result()

    def close(self) -> None:
        """Forget what nobody has taken, and wait for the thread, which makes one tensor more at most."""
        with self._lock:
            self._left.clear()
            self._made.clear()
        self._thread.join()

    def _make_all(self) -> None:
        while (begun := self._begin()) is not None:
            stored, future = begun
            try:
                future.set_result(read_tensor(stored, torch.float32))
            except BaseException as error:
                # NOTE: whoever takes the tensor would wait without end for a thread that has gone.
                future.set_exception(error)

    def _begin(self) -> tuple[StoredTensor, Future[torch.Tensor]] | None:
        with self._lock:
            stored = next(iter(self._left), None)
            if stored is None:
                return None
            del self._left[stored]
            future = self._made[stored] = Future()
        return stored, future


def read_blocks(
    stored: StoredTensor, kind: str, fix: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> QuantizedWeight:
    """A weight [outer, inner] of blocks that `AS_STORED` names for `kind`, with the integers of the file.

    `fix` puts rows into their order. Raises OSError for a file that is cut off meanwhile, and `GgufRefused` for scales
    that are not finite.
    """
    package = extras.require("gguf", "gguf")
    _, block_nbytes = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[stored.kind]]
    outer, inner = stored.shape
    with stored.file.open("rb", buffering=0) as stream:
        data = _read(stream.fileno(), stored.nbytes, stored.start, stored).reshape(-1, block_nbytes)
    least = None
    if stored.kind == "Q4_K":
        factors, least, runs = _k_parts(data)
    elif stored.kind == "Q4_1":
        both = _halves(data, 0, 2)
        factors, least, runs = both[:, :1], both[:, 1:], data[:, 2 * _HALF_NBYTES :]
    else:
        factors, runs = _halves(data, 0), data[:, _HALF_NBYTES:]
    if kind == INT4:
        runs = np.concatenate([runs & 15, runs >> 4], axis=-1)
    values = torch.from_numpy(np.ascontiguousarray(runs).view(np.int8)).reshape(outer, inner)
    scales = checked(torch.from_numpy(np.ascontiguousarray(factors)).reshape(outer, -1), stored)
    zeros = torch.full_like(scales, 8) if kind == INT4 else None
    if least is not None:
        lowest = checked(torch.from_numpy(np.ascontiguousarray(least)).reshape(outer, -1), stored)
        # A group without a scale has one number. Its integers become 0, and its scale any that gives the number.
        flat = scales == 0
        values.view(outer, -1, _BLOCK)[flat] = 0
        scales = torch.where(flat, torch.where(lowest == 0, 1.0, lowest.abs() * LEAST_STEP), scales)
        zeros = -lowest / scales
    if fix is not None:
        values, scales, zeros = fix(values), fix(scales), None if zeros is None else fix(zeros)
    zeros = None if zeros is None else zeros.contiguous()
    return QuantizedWeight(kind, values.contiguous(), scales.contiguous(), _BLOCK, zeros)


def _read(file: int, nbytes: int, place: int, stored: StoredTensor) -> Blocks:
    """Bytes of an open file."""
    buffer = bytearray(nbytes)
    view, done = memoryview(buffer), 0
    while done < nbytes:
        count = os.preadv(file, [view[done:]], place + done)
        if not count:
            raise OSError(f"{stored.file.name} was cut off while the model was read")
        done += count
    return np.frombuffer(buffer, dtype=np.uint8)


def _halves(blocks: Blocks, first: int, count: int = 1) -> Numbers:
    """`count` numbers in half precision from a byte of each block on, float32 [blocks, count]."""
    held = np.ascontiguousarray(blocks[:, first : first + count * _HALF_NBYTES])
    return held.view(np.float16).astype(np.float32)


def _spread(runs: Blocks, numbers: Numbers) -> None:
    """The halves of bytes [..., n] as numbers [..., 2 n]."""
    width: Any = runs.shape[-1]
    np.bitwise_and(runs, 15, out=numbers[..., :width], casting="unsafe")
    np.right_shift(runs, 4, out=numbers[..., width:], casting="unsafe")


def _q4_0(blocks: Blocks, numbers: Numbers) -> None:
    """A scale, and 32 numbers around 8."""
    _spread(blocks[:, _HALF_NBYTES:], numbers)
    numbers -= 8
    numbers *= _halves(blocks, 0)


def _q4_1(blocks: Blocks, numbers: Numbers) -> None:
    """A scale, a least number, and 32 numbers above the least."""
    scales = _halves(blocks, 0, 2)
    _spread(blocks[:, 2 * _HALF_NBYTES :], numbers)
    numbers *= scales[:, :1]
    numbers += scales[:, 1:]


def _q8_0(blocks: Blocks, numbers: Numbers) -> None:
    """A scale, and 32 signed numbers."""
    numbers[:] = blocks[:, _HALF_NBYTES:].view(np.int8)
    numbers *= _halves(blocks, 0)


def _q4_k(blocks: Blocks, numbers: Numbers) -> None:
    """Two scales, those of 8 parts of 32 numbers, and the numbers."""
    scales, least, runs = _k_parts(blocks)
    _spread(runs, numbers.reshape(-1, 4, 64))
    parts = numbers.reshape(-1, 8, 32)
    parts *= scales[..., None]
    parts += least[..., None]


def _k_parts(blocks: Blocks) -> tuple[Numbers, Numbers, Blocks]:
    """Scales and least numbers [blocks, 8] of blocks of Q4_K, and their bytes of two numbers each [blocks, 4, 32]."""
    package = extras.require("gguf", "gguf")
    first = 2 * _HALF_NBYTES
    scales, least = package.quants.Q4_K.get_scale_min(blocks[:, first : first + _K_SCALES_NBYTES])
    both = _halves(blocks, 0, 2)
    runs = blocks[:, first + _K_SCALES_NBYTES :].reshape(-1, 4, 32)
    return both[:, :1] * scales.astype(np.float32), -(both[:, 1:] * least.astype(np.float32)), runs


_TURNS: dict[str, Callable[[Blocks, Numbers], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
}
"""Turns blocks [blocks, bytes] into numbers [blocks, values], by the name of the type."""
