"""Attention within the sequences of a packed row by scaled_dot_product_attention, on any device and dtype.

Sequences of equal length are neighbours, so each run of them is one rectangular call.  With a sliding window the
call goes by blocks of queries, and each block meets only the keys that its windows reach.  Runs with tokens that
attention does not see (short queries filled up with mask tokens) get a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workers.adapters.shared.packing import Layout

# Queries per block of windowed attention.
WINDOW_BLOCK = 256


def attend_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    causal: bool,
    reach: int | None,
) -> torch.Tensor:
    """scaled_dot_product_attention per run of equal lengths; shapes as in `packed_attention`.

    PERF: a run costs three views, one kernel and one copy into the common output; nothing is done per token.
    """
    heads, tokens = query.shape[1:3]
    gqa = key.shape[1] != heads
    out = query.new_empty((1, tokens, heads, value.shape[-1]))
    row = out[0]
    first = 0
    for start, count, length in layout.runs:
        stop = start + count * length
        q, k, v = (
            states[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        if start in layout.partial:
            mask = _partial_mask(layout, start, (first, count, length), causal, reach)
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa)
        elif reach is None or length <= reach + 1:
            found = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal and length > 1, scale=scaling, enable_gqa=gqa
            )
        else:
            found = _attend_windows(q, k, v, layout, scaling, causal, reach)
        row[start:stop].view(count, length, heads, -1).copy_(found.transpose(1, 2))
        first += count
    return out


def _attend_windows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scaling: float | None,
    causal: bool,
    reach: int,
) -> torch.Tensor:
    """Windowed attention of one run, [count, heads, length, dim], by blocks of queries with the keys they reach."""
    length = q.shape[2]
    blocks = []
    for start in range(0, length, WINDOW_BLOCK):
        stop = min(start + WINDOW_BLOCK, length)
        low, high = max(0, start - reach), stop if causal else min(length, stop + reach)
        mask = _window_mask(layout, (stop - start, high - low, start - low, reach, causal), q.device)
        blocks.append(
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, low:high],
                v[:, :, low:high],
                attn_mask=mask,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(blocks, dim=2)


def _partial_mask(
    layout: Layout, start: int, run: tuple[int, int, int], causal: bool, reach: int | None
) -> torch.Tensor:
    """Boolean [count, 1, queries, keys] of a run with unseen tokens: keys that are seen and in reach."""
    mask = layout.masks.get((start, reach))
    if mask is None:
        first, count, length = run
        assert layout.seen is not None
        at = torch.arange(length, device=layout.seen.device)
        visible = at < layout.seen[first : first + count, None]
        distance = at[:, None] - at[None]
        near = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if reach is not None:
            near &= distance.abs() <= reach
        mask = visible[:, None, None] & near
        layout.masks[start, reach] = mask
    return mask


def _window_mask(
    layout: Layout, shape: tuple[int, int, int, int, bool], device: torch.device
) -> torch.Tensor:
    """Boolean [queries, keys]: which key a query may see; query 0 stands at key `offset`.  Kept for the batch."""
    mask = layout.masks.get(shape)
    if mask is None:
        queries, keys, offset, reach, causal = shape
        here = torch.arange(offset, offset + queries, device=device)[:, None]
        distance = here - torch.arange(keys, device=device)[None]
        mask = (distance <= reach) & (distance >= (0 if causal else -reach))
        layout.masks[shape] = mask
    return mask
