"""Triton programs for the small operations of a layer, each in one kernel. Needs CUDA, or Triton's interpreter.

1. `normalize`: the root mean square norm of a row, in both orders of rounding that transformers' modules have.
2. `add_normalize`: the sum of a residual row and what a layer adds, with the norm of the sum. The norms at the end of a
   model take only the rows whose logits are asked for.
3. `turn`: rotary positions of queries and keys, and the keys and values written to their cells of the cache.
4. `gate`: the activation of one half times the other half.

Each rounds where the modules of transformers round, so results differ by the order of sums alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def _normed(values, scales, epsilon, kind: tl.constexpr, WIDTH: tl.constexpr, LATE: tl.constexpr):
    """A row float32 over its root mean square, times `scales`, rounded to `kind`, as float32.

    With `LATE` the row is rounded before the scales as well.
    """
    values = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + epsilon))
    if LATE:
        values = values.to(kind).to(tl.float32)
    return (values * scales).to(kind).to(tl.float32)


@triton.jit
def normalize(
    x, weight, out, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr,
):
    """x [rows, WIDTH] over its root mean square, times `OFFSET` + weight [WIDTH], to `out`; a program for each row."""
    kind: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    is_in = at < WIDTH
    values = tl.load(x + row * WIDTH + at, mask=is_in, other=0.0).to(tl.float32)
    scales = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32) + OFFSET
    values = _normed(values, scales, epsilon, kind, WIDTH, LATE)
    tl.store(out + row * WIDTH + at, values.to(kind), mask=is_in)


@triton.jit
def add_normalize(
    hidden, more, behind, weight, rows, out, behind_epsilon, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr,
    BEHIND: tl.constexpr, BEHIND_OFFSET: tl.constexpr, BEHIND_LATE: tl.constexpr, PICKS: tl.constexpr,
):
    """hidden + more, both [rows, WIDTH]: the sum to `hidden`, its norm with weight [WIDTH] to `out`.

    A program for each row. With `BEHIND` the norm of `more` with behind [WIDTH] is added in its place. With `PICKS` the
    programs take the rows int64 [kept], `out` is [kept, WIDTH], and `hidden` stays.
    """
    kind: tl.constexpr = out.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    row = place
    if PICKS:
        row = tl.load(rows + place)
    at = tl.arange(0, PADDED)
    is_in = at < WIDTH
    added = tl.load(more + row * WIDTH + at, mask=is_in, other=0.0).to(tl.float32)
    if BEHIND:
        scales = tl.load(behind + at, mask=is_in, other=0.0).to(tl.float32) + BEHIND_OFFSET
        added = _normed(added, scales, behind_epsilon, kind, WIDTH, BEHIND_LATE)
    values = tl.load(hidden + row * WIDTH + at, mask=is_in, other=0.0).to(tl.float32) + added
    if not PICKS:
        tl.store(hidden + row * WIDTH + at, values.to(kind), mask=is_in)
    scales = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32) + OFFSET
    values = _normed(values.to(kind).to(tl.float32), scales, epsilon, kind, WIDTH, LATE)
    tl.store(out + place * WIDTH + at, values.to(kind), mask=is_in)


@triton.jit
def _of_head(
    head, norm, epsilon, at, is_in,
    DIM: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr,
):
    """The numbers `at` of a head [DIM], float32; with `NORM` those of the norm of the head with norm [DIM]."""
    kind: tl.constexpr = head.dtype.element_ty
    values = tl.load(head + at, mask=is_in, other=0.0).to(tl.float32)
    if NORM:
        dims = tl.arange(0, PADDED)
        whole = tl.load(head + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        values = values * (1.0 / tl.sqrt(tl.sum(whole * whole, 0) / DIM + epsilon))
        if LATE:
            values = values.to(kind).to(tl.float32)
        scales = tl.load(norm + at, mask=is_in, other=0.0).to(tl.float32) + OFFSET
        values = (values * scales).to(kind).to(tl.float32)
    return values


@triton.jit
def turn(
    q, k, v, cosines, sines, slots, keys, values, q_norm, k_norm, q_epsilon, k_epsilon, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    TURNED: tl.constexpr, PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr,
):
    """Queries and keys [rows, heads, DIM] in place, with keys and values also to keys, values [slots, KEY_HEADS, DIM].

    A program for each row, and each head of q, k and v, whose rows lie `q_stride`, `k_stride`, `v_stride` apart. The
    first `TURNED` numbers of a head turn by cosines and sines [rows, TURNED]. slots int64 [rows] are cells of the
    cache. With `NORM` q and k are first normed, each head with q_norm and k_norm [DIM].
    """
    kind: tl.constexpr = q.dtype.element_ty
    half: tl.constexpr = TURNED // 2
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cell = tl.load(slots + row) * KEY_HEADS * DIM
    if head >= HEADS + KEY_HEADS:
        place = head - HEADS - KEY_HEADS
        dims = tl.arange(0, PADDED)
        whole = tl.load(v + row * v_stride + place * DIM + dims, mask=dims < DIM)
        tl.store(values + cell + place * DIM + dims, whole, mask=dims < DIM)
    else:
        is_key = head >= HEADS
        place = tl.where(is_key, head - HEADS, head)
        if is_key:
            near, norm, epsilon = k + row * k_stride + place * DIM, k_norm, k_epsilon
        else:
            near, norm, epsilon = q + row * q_stride + place * DIM, q_norm, q_epsilon
        at = tl.arange(0, PADDED_HALF)
        is_in = at < half
        low = _of_head(near, norm, epsilon, at, is_in, DIM, PADDED, NORM, OFFSET, LATE)
        high = _of_head(near, norm, epsilon, at + half, is_in, DIM, PADDED, NORM, OFFSET, LATE)
        angle = row * TURNED + at
        low_cosine = tl.load(cosines + angle, mask=is_in, other=0.0).to(tl.float32)
        high_cosine = tl.load(cosines + angle + half, mask=is_in, other=0.0).to(tl.float32)
        low_sine = tl.load(sines + angle, mask=is_in, other=0.0).to(tl.float32)
        high_sine = tl.load(sines + angle + half, mask=is_in, other=0.0).to(tl.float32)
        new_low = ((low * low_cosine).to(kind).to(tl.float32) - (high * low_sine).to(kind).to(tl.float32)).to(kind)
        new_high = ((high * high_cosine).to(kind).to(tl.float32) + (low * high_sine).to(kind).to(tl.float32)).to(kind)
        rest = TURNED + tl.arange(0, PADDED_REST)
        is_rest = rest < DIM
        kept = tl.zeros((PADDED_REST,), tl.float32)
        if TURNED < DIM:
            kept = _of_head(near, norm, epsilon, rest, is_rest, DIM, PADDED, NORM, OFFSET, LATE)
        tl.store(near + at, new_low, mask=is_in)
        tl.store(near + half + at, new_high, mask=is_in)
        tl.store(near + rest, kept.to(kind), mask=is_rest)
        if is_key:
            cells = keys + cell + place * DIM
            tl.store(cells + at, new_low, mask=is_in)
            tl.store(cells + half + at, new_high, mask=is_in)
            tl.store(cells + rest, kept.to(kind), mask=is_rest)


@triton.jit
def gate(
    gates, ups, out, gate_stride, up_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, TANH: tl.constexpr
):
    """The activation of `gates` times `ups`, both [rows, WIDTH], to `out`; a program for each row and `TILE` numbers.

    Rows of `gates` and `ups` lie `gate_stride` and `up_stride` apart, those of `out` side by side. The activation is
    SiLU, with `TANH` the GELU that is approximated by a hyperbolic tangent.
    """
    kind: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = at < WIDTH
    x = tl.load(gates + row * gate_stride + at, mask=is_in, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * inner)
    else:
        x = x * tl.sigmoid(x)
    x = x.to(kind).to(tl.float32)
    up = tl.load(ups + row * up_stride + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + at, (x * up).to(kind), mask=is_in)
# fmt: on
