"""Variable-length attention in plain torch, with the signatures that torch's own kernel has had."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F


def varlen_attn_2_13(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of [T, heads, dim] within each sequence; `window_size` is (left, right), -1 for no limit.

    The last query of a sequence stands at the last key. With `block_table` int32 [n, pages] keys and values are
    [pages, tokens, heads, dim], of which each sequence has its first `seqused_k` int32 [n] tokens.
    """
    assert enable_gqa or query.shape[1] == key.shape[-2]
    left, right = window_size
    parts = []
    for number, (start, stop) in enumerate(itertools.pairwise(cu_seq_q.tolist())):
        if block_table is not None:
            assert seqused_k is not None and block_table.dtype == seqused_k.dtype == torch.int32
            pages = block_table[number].long()
            k, v = (states[pages].flatten(0, 1)[: int(seqused_k[number])] for states in (key, value))
        else:
            assert cu_seq_k is not None
            k, v = (states[cu_seq_k[number] : cu_seq_k[number + 1]] for states in (key, value))
        q, k, v = (states.transpose(0, 1) for states in (query[start:stop], k, v))
        assert q.shape[1] <= max_q and k.shape[1] <= max_k
        at = torch.arange(k.shape[1])
        distance = at[-q.shape[1] :, None] - at[None]
        seen = (distance <= (left if left >= 0 else max_k)) & (distance >= -(right if right >= 0 else max_k))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


@functools.wraps(varlen_attn_2_13)
def flash_attention_2(*states: Any, **named: Any) -> torch.Tensor:
    """As torch 2.13 with FlashAttention 2: few pages fit, and lengths of the keys are wanted beside a block table."""
    if named.get("block_table") is not None:
        if states[4] is None:
            raise RuntimeError("cu_seqlens_k must be given")
        if states[1].shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        assert named["num_splits"] == 1, "rows of later sequences would not be written"
    return varlen_attn_2_13(*states, **named)


@functools.wraps(varlen_attn_2_13)
def flash_attention_3(*states: Any, **named: Any) -> torch.Tensor:
    """As torch 2.13 with FlashAttention 3 activated: a block table forbids lengths of the keys."""
    if named.get("block_table") is not None and states[4] is not None:
        raise RuntimeError("If cu_seqlens_k is passed in, then page table is not supported")
    return varlen_attn_2_13(*states, **named)


def varlen_attn_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """The same before grouped heads and block tables were offered."""
    return varlen_attn_2_13(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )


def varlen_attn_2_10(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """The same before scale and windows were offered."""
    window = (-1, 0 if is_causal else -1)
    return varlen_attn_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window)
