"""The kernels through Triton's interpreter; run as a program, with TRITON_INTERPRET=1 set before Triton is imported.

An argument that is a precision of torch compares each kernel with plain torch, on rows and heads of several sizes.
Others are a name of `tests.tiny.kernel_shapes.SHAPES`, a precision, and what is computed, with colons between:
`modules` are the norms and gates of a model in a pass, `step` is a step by `KernelDecoder`, whose making proves the
kernels. `attention` compares the attention of captured steps with plain torch.

Prints lines of JSON: what was computed, and the differences, as parts of the greatest number.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.fakes.torch_kernels import TorchKernels
from workers.generation import fused
from workers.generation.fused import Cells, HeadRows, NormForm
from workers.generation.paged_decode import PagedDecode, compare_with_torch
from workers.generation.paged_tiles import PagedTiles, compare_tiles

WIDTHS = (33,)
SHAPES = ((2, 1, 16, 16), (3, 3, 10, 6))
"""Query heads, key heads, their width, and how many numbers of a head turn."""
ATTENTION = ((4, 2, 16, 16, 4, 8), (6, 2, 10, 12, 16, 4), (3, 3, 20, 20, 8, 16), (7, 1, 16, 16, 16, 2))
"""Query heads, key heads, the widths of keys and values, tokens of a block, and queries of a tile."""
ROWS, SLOTS = 2, 5


def round_as_cards_do() -> None:
    """The interpreter cuts off what a card rounds, where float32 becomes bfloat16."""
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float

    def rounded(states: NDArray[Any], source: Any, target: Any, mode: Any) -> NDArray[Any]:
        if (str(source), str(target)) != ("fp32", "bf16"):
            found: NDArray[Any] = convert(states, source, target, mode)
            return found
        near = torch.from_numpy(np.ascontiguousarray(states, np.float32)).bfloat16()
        return near.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = rounded


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The greatest one, as a part of the greatest number."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())


class Drawn:
    """Random numbers of one precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def form(self, width: int, offset: float, late: bool) -> NormForm:
        return NormForm(self(width), 1e-6, offset, late)


def rows_of(kernels: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Norms, sums with norms, and gates."""
    drawn, found = Drawn(dtype), []
    for width in WIDTHS:
        form, behind = drawn.form(width, 0.0, True), drawn.form(width, 1.0, False)
        for each in (form, behind):
            found.append(kernels.norm(each, drawn(ROWS, width)))
        some = torch.tensor([1])
        for after, rows in ((None, None), (behind, None), (behind, some), (None, some)):
            hidden = drawn(ROWS, width)
            found += [kernels.add_norm(form, hidden, drawn(ROWS, width), after, rows), hidden]
        wide = drawn(1, ROWS, 2 * width)
        for tanh in (False, True):
            found.append(kernels.gated(*wide.chunk(2, dim=-1), tanh))
    return found


def heads_of(kernels: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Heads that turn, side by side and each by itself, with norms and without, and the cache behind."""
    drawn, found = Drawn(dtype), []
    for heads, key_heads, dim, turned in SHAPES:
        for normed, is_whole in ((False, True), (True, False)):
            counts = [heads, key_heads, key_heads]
            parts = drawn(ROWS, sum(counts), dim).split(counts, 1)
            states = HeadRows(*parts) if is_whole else HeadRows(*(part.contiguous() for part in parts))
            cache = drawn(2, SLOTS, key_heads, dim)
            norms = (drawn.form(dim, 1.0, False), drawn.form(dim, 1.0, False)) if normed else None
            turns = drawn(ROWS, turned), drawn(ROWS, turned)
            kernels.turn(states, turns, Cells(*cache, torch.tensor([4, 0])), norms)
            found += [*states, cache]
    return found


def modules(model: Any, kernels: fused.Kernels) -> list[float]:
    """`fuse_with`, and a pass of the whole model: the difference, and how many modules keep their form."""
    ids = torch.arange(5, 13)[None]
    with torch.inference_mode():
        plain = model(input_ids=ids).logits
        fused.fuse_with(model, kernels)
        found = model(input_ids=ids).logits
    kept = sum(bool(fused._forms_of(one, kernels, model.dtype)) for one in model.modules())
    return [difference(found, plain), kept]


def step(model: Any, kernels: fused.Kernels) -> list[float]:
    """The logits, the cells that the step writes, and all other cells."""
    from tests.fakes.mixed_steps import MixedSteps

    steps = MixedSteps(model, kernels)
    plain, found = steps.run(by_kernels=False), steps.run(by_kernels=True)
    mine = torch.zeros(plain.cache.shape[2], dtype=torch.bool).index_fill_(
        0, torch.tensor(steps.written()), True
    )
    return [
        float((found.logits - plain.logits).abs().mean() / plain.logits.abs().mean()),
        *(difference(found.cache[:, :, some], plain.cache[:, :, some]) for some in (mine, ~mine)),
    ]


def attention(dtype: torch.dtype) -> None:
    """Raise RuntimeError where attention of single tokens or of parts of prompts differs."""
    device = torch.device("cpu")
    for heads, key_heads, dim, value_dim, page, queries in ATTENTION:
        shapes = heads, torch.Size((key_heads, dim)), torch.Size((key_heads, value_dim)), page
        compare_tiles(PagedTiles(page, queries), device, dtype, *shapes, queries)
        compare_with_torch(PagedDecode(page, 1), device, dtype, *shapes)


def main() -> None:
    """Compute what the arguments say."""
    round_as_cards_do()
    kernels = fused.Kernels()
    for each in sys.argv[1:]:
        if each == "attention":
            for dtype in (torch.float32, torch.float16):
                attention(dtype)
            print(json.dumps([each]))
            continue
        shape, _, rest = each.rpartition(":")
        if not shape:
            dtype = getattr(torch, each)
            for compute in (rows_of, heads_of):
                pairs = zip(compute(kernels, dtype), compute(TorchKernels(), dtype), strict=True)
                found = [difference(*pair) for pair in pairs]
                print(json.dumps([each, len(found), max(found)]), flush=True)
            continue
        from tests.fakes.mixed_steps import with_drawn_norms
        from tests.tiny import kernel_shapes

        shape, precision = shape.split(":")
        model = with_drawn_norms(kernel_shapes.make(shape)).to(getattr(torch, precision))
        print(json.dumps([each, *{"modules": modules, "step": step}[rest](model, kernels)]), flush=True)


if __name__ == "__main__":
    main()
