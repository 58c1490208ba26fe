"""Attention of single tokens over the blocks of the cache, for steps that CUDA captures.

1. `select_decode` compares the Triton programs of `decode_kernels` with plain torch on the device, with and without a
   window, a soft cap and sinks. Programs that differ are not used.
2. `PagedDecode` starts both programs for the sequences of a step. The host reads nothing of the step, so a captured
   step serves any blocks and lengths.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from workers.device.oom import obstacle_of
from workers.device.varlen import HALF
from workers.generation.heads import Heads

log = logging.getLogger(__name__)

_TILE = 64
"""Keys that a program reads at once."""
_WIDEST = 256
"""Greatest width of a head."""
_SPLITS = 4, 16
"""Two numbers only, since each costs a compilation."""
_TOLERANCE = 3e-2
_STALE = 30.0
"""Fills the cells that no query may see."""


class DecodeLayout(NamedTuple):
    """Where the keys of each sequence lie: `table` int32 [n, pages], and `lengths` int64 [n] in tokens."""

    table: torch.Tensor
    lengths: torch.Tensor


Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DecodeLayout, Heads], torch.Tensor]
"""Attention of single tokens, with the arguments of `PagedDecode`."""


class PagedDecode:
    """The programs for caches whose blocks have `page_tokens` tokens."""

    def __init__(self, page_tokens: int, processors: int) -> None:
        """`processors` are those of the device. Raises ImportError without Triton."""
        from workers.generation.decode_kernels import attend_split, join_splits

        self._attend, self._join = attend_split, join_splits
        self._page, self._processors = page_tokens, processors

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: DecodeLayout,
        heads: Heads,
    ) -> torch.Tensor:
        """q [n, heads, dim] to [n, heads, value dim]; keys and values [slots, key heads, dim] are the cache."""
        count, query_heads, dim = q.shape
        key_heads, value_dim = values.shape[1:]
        q = q if q.stride(2) == 1 else q.contiguous()
        splits = self._splits(count * key_heads)
        parts = torch.empty(count, query_heads, splits, value_dim, dtype=torch.float32, device=q.device)
        peaks, sums = torch.empty(2, count, query_heads, splits, dtype=torch.float32, device=q.device)
        out = q.new_empty(count, query_heads, value_dim)
        self._attend[count, key_heads, splits](
            q,
            keys,
            values,
            layout.table,
            layout.lengths,
            parts,
            peaks,
            sums,
            dim**-0.5 if heads.scaling is None else heads.scaling,
            heads.softcap or 0.0,
            q.stride(0),
            q.stride(1),
            layout.table.shape[1],
            HEADS=query_heads,
            KEY_HEADS=key_heads,
            DIM=dim,
            VALUE_DIM=value_dim,
            PADDED_DIM=_padded(dim),
            PADDED_VALUE_DIM=_padded(value_dim),
            ROWS=_padded(query_heads // key_heads),
            PAGE=self._page,
            TILE=_TILE,
            SPLITS=splits,
            WINDOW=heads.window,
            SOFTCAP=bool(heads.softcap),
        )
        self._join[count, query_heads](
            parts,
            peaks,
            sums,
            peaks if heads.sinks is None else heads.sinks,
            out,
            HEADS=query_heads,
            VALUE_DIM=value_dim,
            PADDED_VALUE_DIM=_padded(value_dim),
            SPLITS=splits,
            SINKS=heads.sinks is not None,
        )
        return out

    def _splits(self, groups: int) -> int:
        """Programs for the keys of each of so many key heads: without many, few sequences leave processors idle."""
        few, many = _SPLITS
        return many if groups * few < self._processors else few


def _padded(size: int) -> int:
    """The next power of two; a product on tensor cores wants 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


@functools.cache
def select_decode(
    device: torch.device, dtype: torch.dtype, heads: int, key: torch.Size, value: torch.Size, page_tokens: int
) -> PagedDecode | None:
    """The programs for heads of one shape, `key` and `value` being heads and dim; None where they do not serve."""
    if device.type != "cuda" or dtype not in HALF or max(key[1], value[1]) > _WIDEST:
        return None
    try:
        decode = PagedDecode(page_tokens, torch.cuda.get_device_properties(device).multi_processor_count)
        compare_with_torch(decode, device, dtype, heads, key, value, page_tokens)
    except Exception as error:
        log.warning("steps are not captured, as the attention of single tokens fails: %s", obstacle_of(error))
        return None
    return decode


def compare_with_torch(
    decode: Decode,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key: torch.Size,
    value: torch.Size,
    page_tokens: int,
) -> None:
    """Raise RuntimeError if the results for sequences of several lengths differ from those of `Heads.masked`."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, page_tokens, page_tokens + 1, 600 + 5 * page_tokens]
    pages = [-(-length // page_tokens) for length in lengths]
    # NOTE: page 0, which fills the table up, belongs to no sequence.
    order = (1 + torch.randperm(sum(pages), generator=generator)).split(pages)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    keys, values = (
        torch.full(((1 + sum(pages)) * page_tokens, *shape), _STALE, dtype=dtype) for shape in (key, value)
    )
    slots = [
        (own[:, None] * page_tokens + torch.arange(page_tokens)).flatten()[:length]
        for own, length in zip(order, lengths, strict=True)
    ]
    for cells in slots:
        keys[cells] = torch.randn(len(cells), *key, generator=generator).to(dtype)
        values[cells] = torch.randn(len(cells), *value, generator=generator).to(dtype)
    q = torch.randn(len(lengths), heads, key[1], generator=generator).to(dtype)
    layout = DecodeLayout(table.int().to(device), torch.tensor(lengths, device=device))
    q, keys, values = (states.to(device) for states in (q, keys, values))
    sinks = torch.randn(heads, generator=generator).to(device)
    for formula in (
        Heads(None, None, None, 0, None),
        Heads(0.2, 5.0, None, page_tokens + 5, None),
        Heads(None, None, sinks, 0, None),
    ):
        got = decode(q, keys, values, layout, formula)
        for row, cells in enumerate(slots):
            at = torch.arange(len(cells))
            seen = formula.allows(at[-1:, None], at[None]).to(device)
            k, v = (states[cells.to(device)].float() for states in (keys, values))
            wanted = formula.masked(q[row : row + 1].float(), k, v, seen)[0]
            if not torch.allclose(got[row].float(), wanted, atol=_TOLERANCE, rtol=_TOLERANCE):
                raise RuntimeError(
                    f"the results for {len(cells)} keys differ from those of torch ({formula})"
                )
