"""Variable-length attention in plain torch, with the signatures that torch's own kernel has had."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def varlen_attn_2_13(
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
    enable_gqa: bool = False,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of [T, heads, dim] within each sequence; `window_size` is (left, right), -1 for no limit."""
    left, right = window_size
    parts = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        at = torch.arange(stop - start)
        distance = at[:, None] - at[None]
        seen = (distance <= (left if left >= 0 else max_k)) & (distance >= -(right if right >= 0 else max_k))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        parts.append(found.transpose(0, 1))
    return torch.cat(parts)


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
    """The same before grouped heads were offered."""
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
