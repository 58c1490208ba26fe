"""Triton programs for the small operations of a layer, each in one kernel. Needs CUDA, or Triton's interpreter.

1. `normalize`: the root mean square norm of a row, in both orders of rounding that transformers' modules have.
2. `gate`: the activation of one half times the other half.

Each rounds where the modules of transformers round, so results differ by the order of sums alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def normalize(
    x, weight, out, epsilon,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr,
):
    """x [rows, WIDTH] over its root mean square, times `OFFSET` + weight [WIDTH], to `out`; a program for each row.

    With `LATE` the row is rounded before the weight, else behind.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    is_in = at < WIDTH
    values = tl.load(x + row * WIDTH + at, mask=is_in, other=0.0).to(tl.float32)
    scales = tl.load(weight + at, mask=is_in, other=0.0).to(tl.float32) + OFFSET
    values = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + epsilon))
    if LATE:
        values = values.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + at, (values * scales).to(out.dtype.element_ty), mask=is_in)


@triton.jit
def gate(gates, ups, out, count, TILE: tl.constexpr, TANH: tl.constexpr):
    """The activation of `gates` times `ups`, each `count` numbers side by side, to `out`.

    The activation is SiLU, with `TANH` the GELU that is approximated by a hyperbolic tangent.
    """
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_in = at < count
    x = tl.load(gates + at, mask=is_in, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * inner)
    else:
        x = x * tl.sigmoid(x)
    x = x.to(out.dtype.element_ty).to(tl.float32)
    up = tl.load(ups + at, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + at, (x * up).to(out.dtype.element_ty), mask=is_in)
# fmt: on
