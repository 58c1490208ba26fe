"""Attention of one packed step by torch's variable-length kernel, on CUDA in half precision.

1. `select_kernel` tries the forms of the call in the order of `Form`. The first form that agrees with
   scaled_dot_product_attention on the device is used. Without one, `attention` reads the cache in groups.
2. `PagedKernel.layout` puts the lengths and block tables of a step into one tensor, once for all layers.
3. One call for each layer serves all sequences: those that compute one token and the parts of prompts.

The signature of `varlen_attn` tells whether a torch knows block tables, but not which pages its kernel takes.
FlashAttention 2, which torch brings along, takes pages of 256 tokens and multiples, and wants cumulative lengths of the
keys. FlashAttention 3, which a process can activate, takes any page and refuses such lengths.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from workers.device.oom import end_if_broken, is_out_of_memory
from workers.device.transfer import sent
from workers.device.varlen import HALF, Bounds, VarlenFunction

log = logging.getLogger(__name__)

_PAGING = ("block_table", "seqused_k", "num_splits", "enable_gqa")
"""What block tables need. FlashAttention 2 leaves rows unwritten if it splits the keys of a sequence by itself."""
_TOLERANCE = 3e-2
_STALE = 30.0
"""Fills what no query of the check may see. A kernel that reads beyond a sequence's end gives other results."""


class Form(Enum):
    """How a call gets the keys of all sequences."""

    PAGES = "block table"
    COUNTED_PAGES = "block table and cumulative lengths"
    GATHERED = "gathered keys"


Kind = tuple[Form, int]


class Stretch(NamedTuple):
    """A step computes the tokens `start` to `stop` of a sequence, whose blocks are int64 [blocks]."""

    start: int
    stop: int
    blocks: NDArray[np.int64]


class StepLayout(NamedTuple):
    """One step, as each layer's call needs it.

    Pages: `seen` int32 [n] tokens are valid of the pages `table` int32 [n, pages]. Gathered keys: `slots` int32 [keys]
    are their places in the cache.
    """

    bounds: Bounds
    seen: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor


class PagedKernel:
    """`varlen_attn` over the blocks of the cache, in one form."""

    def __init__(self, function: Callable[..., Any], page_tokens: int, form: Form) -> None:
        """Raises NotImplementedError if `function` lacks an argument of the form."""
        self._function, self._page, self.form = VarlenFunction(function), page_tokens, form
        if form is not Form.GATHERED:
            self._function.require(*_PAGING)

    def kind(self, window: int) -> Kind:
        """Layers of one kind share a layout: all where pages are read, else those of one window."""
        return self.form, window if self.form is Form.GATHERED else 0

    def layout(self, stretches: Sequence[Stretch], window: int, device: torch.device) -> StepLayout:
        """The layout of a step for layers whose queries see `window` tokens (0: every token before)."""
        size, gathers = self._page, self.form is Form.GATHERED
        starts, stops = (np.array([each[place] for each in stretches], np.int32) for place in (0, 1))
        lows = np.maximum(0, starts + 1 - window) if gathers and window else np.zeros_like(stops)
        queries, keys = stops - starts, stops - lows
        table = np.zeros((0, 0), np.int32)
        slots = np.zeros(0, np.int32)
        if gathers:
            slots = np.concatenate(
                [
                    _slots(each.blocks, each.stop, low, size)
                    for each, low in zip(stretches, lows.tolist(), strict=True)
                ]
            )
        else:
            table = np.zeros((len(stretches), -(-int(stops.max()) // size)), np.int32)
            for row, each in zip(table, stretches, strict=True):
                used = -(-each.stop // size)
                row[:used] = each.blocks[:used]
        pieces = [_bounds(queries), _bounds(keys), stops, table.reshape(-1), slots]
        # PERF: one transfer for all.
        whole = sent(np.concatenate(pieces), device)
        cu_queries, cu_keys, seen, flat, places = whole.split([len(piece) for piece in pieces])
        bounds = Bounds(
            cu_queries,
            None if self.form is Form.PAGES else cu_keys,
            int(queries.max()),
            int(keys.max()),
        )
        return StepLayout(bounds, seen, flat.view(table.shape), places)

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: StepLayout,
        scaling: float | None,
        window: int,
    ) -> torch.Tensor:
        """q [tokens, heads, dim] of a step to the same shape; keys and values [slots, key heads, dim] are the cache."""
        pages: dict[str, torch.Tensor] = {}
        if self.form is Form.GATHERED:
            k, v = (states.index_select(0, layout.slots) for states in (keys, values))
        else:
            k, v = (states.unflatten(0, (-1, self._page)) for states in (keys, values))
            pages = {"seqused_k": layout.seen, "block_table": layout.table}
        seen = (window - 1 if window else -1, 0)
        if not window and layout.bounds.max_queries == 1:
            # PERF: a single query sees every key. Without a mask FlashAttention 2 reads keys once for all query heads.
            seen = (-1, -1)
        return self._function(q, k, v, layout.bounds, scaling, seen, **pages)


def _bounds(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate(([0], lengths.cumsum())).astype(np.int32)


def _slots(blocks: NDArray[np.int64], stop: int, low: int, size: int) -> NDArray[np.int32]:
    """Places in the cache of the tokens `low` to `stop`."""
    at = np.arange(low, stop)
    return (blocks[at // size] * size + at % size).astype(np.int32)


@functools.cache
def select_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page_tokens: int
) -> PagedKernel | None:
    """The kernel for heads of one shape; None where `attention` reads the cache in groups."""
    if device.type != "cuda" or dtype not in HALF:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        log.warning("variable-length attention does not read the cache: %s", error)
        return None
    return proven(varlen_attn, device, dtype, heads, kv_heads, dim, page_tokens)


def proven(
    function: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
) -> PagedKernel | None:
    """`function` in the first form that agrees with scaled_dot_product_attention; one line of log tells of others."""
    refused = []
    for form in Form:
        try:
            kernel = PagedKernel(function, page_tokens, form)
            _compare_with_sdpa(kernel, device, dtype, heads, kv_heads, dim, page_tokens)
        except (RuntimeError, ValueError, TypeError) as error:
            end_if_broken(error)
            if is_out_of_memory(error):
                raise
            refused.append(f"{form.value}: {str(error).splitlines()[0]}")
            continue
        if refused:
            log.info("variable-length attention reads the cache by %s (%s)", form.value, "; ".join(refused))
        return kernel
    log.warning("variable-length attention does not read the cache (%s)", "; ".join(refused))
    return None


def _compare_with_sdpa(
    kernel: PagedKernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
) -> None:
    """Single tokens, and single tokens beside parts of prompts, with and without a window.

    Raises RuntimeError where the results differ.
    """
    size = page_tokens
    single = [(length - 1, length) for length in (1, size, size + 1, 3 * size - 1, 600 + 5 * size)]
    parts = [(0, 2 * size + 3), (size + 3, 3 * size + 5)]
    generator = torch.Generator().manual_seed(0)
    for spans in (single, [*single, *parts]):
        stretches, cells = _pages_of(spans, size)
        states = torch.full((2, cells, kv_heads, dim), _STALE)
        written = np.concatenate([_slots(each.blocks, each.stop, 0, size) for each in stretches])
        states[:, written] = torch.randn((2, len(written), kv_heads, dim), generator=generator)
        q = torch.randn((sum(stop - start for start, stop in spans), heads, dim), generator=generator)
        q, keys, values = q.to(device, dtype), *states.to(device, dtype)
        for window in (0, size + 5):
            layout = kernel.layout(stretches, window, device)
            got = kernel(q, keys, values, layout, 0.5 * dim**-0.5, window)
            wanted = _by_sdpa(q, keys, values, stretches, 0.5 * dim**-0.5, window, size)
            if not torch.allclose(got.float(), wanted.float(), atol=_TOLERANCE, rtol=_TOLERANCE):
                raise RuntimeError(f"varlen_attn differs from SDPA (window={window})")


def _pages_of(spans: list[tuple[int, int]], size: int) -> tuple[list[Stretch], int]:
    """Blocks for sequences in an order without order, and the tokens that the blocks hold together."""
    counts = [-(-stop // size) for _, stop in spans]
    # NOTE: block 0, which fills up tables, belongs to no sequence.
    order = 1 + np.random.default_rng(0).permutation(sum(counts))
    blocks = np.split(order, list(itertools.accumulate(counts))[:-1])
    stretches = [Stretch(*span, own) for span, own in zip(spans, blocks, strict=True)]
    return stretches, (1 + sum(counts)) * size


def _by_sdpa(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    stretches: Sequence[Stretch],
    scaling: float,
    window: int,
    size: int,
) -> torch.Tensor:
    """Each sequence by a call of its own, with a mask."""
    attended, row = [], 0
    for each in stretches:
        rows = slice(row, row := row + each.stop - each.start)
        slots = torch.from_numpy(_slots(each.blocks, each.stop, 0, size)).to(q.device)
        mine, k, v = (states.transpose(0, 1) for states in (q[rows], keys[slots], values[slots]))
        distance = torch.arange(each.start, each.stop)[:, None] - torch.arange(each.stop)
        seen = (distance >= 0) & (distance < (window or each.stop))
        attended.append(
            F.scaled_dot_product_attention(
                mine[None], k[None], v[None], attn_mask=seen.to(q.device), scale=scaling, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(attended)
