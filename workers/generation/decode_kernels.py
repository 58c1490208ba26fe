"""Triton programs for attention over the blocks of the key-value cache, in steps that CUDA captures. Needs CUDA.

1. Of single tokens, `attend_split`: each program takes the query heads of one key head of one sequence, and one of
   `SPLITS` parts of the keys. The keys are read from their blocks, without a copy.
2. `join_splits`: a program for each query head joins the parts by their sums of exponentials.
3. Of parts of prompts, `attend_tiles`: each program takes some queries of one sequence that follow one another, with
   the query heads of one key head.

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


@triton.jit
def _scores(queries, key, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores float32 [queries, keys], with `SOFTCAP` bent to at most `softcap`."""
    scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh by exponentials, which Triton has in every version.
        scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
    return scores


@triton.jit
def _taken(scores, value, part, peak, total):
    """`part`, `peak` and `total` of each query with the keys of `scores` as well, which are -inf for keys not seen."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    # A query whose window begins behind these keys has seen none so far.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(peak - base)
    part = part * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return part, higher, total * kept + tl.sum(weights, 1)


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
        scores = tl.where(is_seen[None, :], _scores(queries, key, scale, softcap, SOFTCAP), float("-inf"))
        value = _cells(values, cell, is_seen, value_dims, VALUE_DIM)
        part, peak, total = _taken(scores, value, part, peak, total)
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


# fmt: off
@triton.jit
def attend_tiles(
    q, keys, values, tiles, table, sinks, out, scale, softcap, row_stride, head_stride, table_width,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):
    """q [rows, HEADS, DIM], whose strides are `row_stride`, `head_stride` and 1, to out [rows, HEADS, VALUE_DIM].

    tiles int32 [tiles, 4] are the first row of a tile, its number of rows (0: the program does nothing; `QUERIES` at
    most), the position of the first row in its sequence, and the sequence, a row of table int32 [sequences,
    table_width]. Rows of sequence -1 become zeros. `keys` and `values` are [slots, KEY_HEADS, dim], sinks [HEADS].
    `GROUP` is the power of two from the query heads of a key head on.
    """
    tile, key_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tiles + tile * 4 + 1)
    if count > 0:
        group: tl.constexpr = HEADS // KEY_HEADS
        begin = tl.load(tiles + tile * 4 + 2)
        sequence = tl.load(tiles + tile * 4 + 3).to(tl.int64)
        lanes = tl.arange(0, QUERIES * GROUP)
        query, head = lanes // GROUP, lanes % GROUP
        is_in = (query < count) & (head < group)
        head = key_head * group + head
        row = (tl.load(tiles + tile * 4) + query).to(tl.int64)
        dims, value_dims = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE_DIM)
        cells = q + row[:, None] * row_stride + head[:, None] * head_stride + dims[None, :]
        queries = tl.load(cells, mask=is_in[:, None] & (dims < DIM)[None, :], other=0.0)
        place = begin + query
        stop = tl.where(sequence < 0, 0, begin + count)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(begin + 1 - WINDOW, 0)
        peak = tl.full((QUERIES * GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES * GROUP,), tl.float32)
        part = tl.zeros((QUERIES * GROUP, PADDED_VALUE_DIM), tl.float32)
        for first in range(low, stop, TILE):
            at = first + tl.arange(0, TILE)
            exists = at < stop
            block = tl.load(table + sequence * table_width + at // PAGE, mask=exists, other=0)
            cell = (block.to(tl.int64) * PAGE + at % PAGE) * KEY_HEADS + key_head
            key = _cells(keys, cell, exists, dims, DIM)
            seen = exists[None, :] & (at[None, :] <= place[:, None])
            if WINDOW > 0:
                seen = seen & (at[None, :] > place[:, None] - WINDOW)
            scores = tl.where(seen, _scores(queries, key, scale, softcap, SOFTCAP), float("-inf"))
            value = _cells(values, cell, exists, value_dims, VALUE_DIM)
            part, peak, total = _taken(scores, value, part, peak, total)
        if SINKS:
            sink = tl.load(sinks + head, mask=is_in, other=0.0).to(tl.float32)
            higher = tl.maximum(peak, sink)
            kept = tl.exp(peak - higher)
            part = part * kept[:, None]
            total = total * kept + tl.exp(sink - higher)
        part = part / tl.where(total == 0.0, 1.0, total)[:, None]
        mask = is_in[:, None] & (value_dims < VALUE_DIM)[None, :]
        places = out + (row * HEADS + head)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(places, part.to(out.dtype.element_ty), mask=mask)
# fmt: on
