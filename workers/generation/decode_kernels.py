"""Triton programs for attention of single tokens over the blocks of the key-value cache. Needs CUDA.

1. `attend_split`: each program takes the query heads of one key head of one sequence, and one of `SPLITS` parts of the
   keys. The keys are read from their blocks, without a copy.
2. `join_splits`: a program for each query head joins the parts by their sums of exponentials.

Lengths and block tables are tensors, so a captured step serves any lengths (`workers.generation.captured`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _cells(pool, cells, is_seen, dims, WIDTH: tl.constexpr):
    """Rows of a pool whose rows have `WIDTH` numbers; zeros where a row is not seen, and beyond its width."""
    mask = is_seen[:, None] & (dims < WIDTH)[None, :]
    return tl.load(pool + cells[:, None] * WIDTH + dims[None, :], mask=mask, other=0.0)


# fmt: off
@triton.jit
def attend_split(
    q, keys, values, table, lengths, parts, peaks, sums, scale, softcap, row_stride, head_stride, table_width,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):
    """One part of the keys of one key head: q [n, HEADS, DIM] to parts float32 [n, HEADS, SPLITS, VALUE_DIM].

    `q` has the strides `row_stride`, `head_stride` and 1. `keys` and `values` are [slots, KEY_HEADS, dim], `table` is
    int32 [n, table_width], `lengths` int64 [n].
    `peaks` and `sums` float32 [n, HEADS, SPLITS] are the greatest score, and the sum of exponentials from there.
    """
    row, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KEY_HEADS
    heads = tl.arange(0, ROWS)
    is_head = heads < group
    heads = key_head * group + heads
    dims, value_dims = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
    cells = q + row * row_stride + heads[:, None] * head_stride + dims[None, :]
    queries = tl.load(cells, mask=is_head[:, None] & (dims < DIM)[None, :], other=0.0)
    length = tl.load(lengths + row).to(tl.int32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - low, SPLITS), TILE) * TILE
    start = low + split * share
    stop = tl.minimum(start + share, length)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    part = tl.zeros((ROWS, PADDED_VALUE_DIM), tl.float32)
    for first in range(start, stop, TILE):
        at = first + tl.arange(0, TILE)
        is_seen = at < stop
        block = tl.load(table + row * table_width + at // PAGE, mask=is_seen, other=0)
        cell = (block.to(tl.int64) * PAGE + at % PAGE) * KEY_HEADS + key_head
        key = _cells(keys, cell, is_seen, dims, DIM)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            # tanh by exponentials, which Triton has in every version.
            scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        kept = tl.exp(peak - higher)
        value = _cells(values, cell, is_seen, value_dims, VALUE_DIM)
        part = part * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * kept + tl.sum(weights, 1)
        peak = higher
    place = (row * HEADS + heads) * SPLITS + split
    tl.store(peaks + place, peak, mask=is_head)
    tl.store(sums + place, total, mask=is_head)
    mask = is_head[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(parts + place[:, None] * VALUE_DIM + value_dims[None, :], part, mask=mask)
# fmt: on


@triton.jit
def join_splits(
    parts,
    peaks,
    sums,
    sinks,
    out,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """All parts of one query head: `out` [n, HEADS, VALUE_DIM]. `sinks` [HEADS] add to the sum only."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = (row * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, PADDED_VALUE_DIM)
    peak = tl.load(peaks + place)
    highest = tl.max(peak, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weights = tl.exp(peak - highest)
    total = tl.sum(weights * tl.load(sums + place), 0)
    if SINKS:
        total += tl.exp(sink - highest)
    is_dim = dims < VALUE_DIM
    part = tl.load(parts + place[:, None] * VALUE_DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
    joined = tl.sum(part * weights[:, None], 0) / total
    tl.store(out + (row * HEADS + head) * VALUE_DIM + dims, joined.to(out.dtype.element_ty), mask=is_dim)
