"""Attention over packed rows, registered with transformers under the name `PACKED`.

transformers' models look their attention function up by name and hand extra keyword arguments through to it.
Ours receives the layout of the row that way and attends within each sequence: with a variable-length kernel where
one is given (CUDA, half precision), else with scaled_dot_product_attention per run of equal lengths.

No mask function is registered on purpose: without one transformers builds no mask at all, which spares decoder
models a look at the position ids on the host in every forward.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from workers.adapters.shared.packing import Layout
from workers.adapters.shared.sdpa_runs import attend_runs
from workers.adapters.shared.varlen import VarlenKernel

PACKED = "penstock_packed"

# Arguments that change the attention formula and that this function does not implement.
_UNSUPPORTED = ("position_bias", "softcap", "s_aux", "sinks", "head_mask", "cache")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packed_layout: Layout | None = None,
    packed_kernel: VarlenKernel | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each sequence of a packed row.

    query [1, heads, T, dim], key and value [1, kv_heads, T, dim]; returns [1, T, heads, dim] and no weights.
    `sliding_window` is the reach to each side plus one, as transformers passes it.  Raises NotImplementedError when
    the model asks for a kind of attention that is not handled here.
    """
    unsupported = [name for name in _UNSUPPORTED if extra.get(name) is not None]
    if packed_layout is None or attention_mask is not None or query.shape[0] != 1 or unsupported:
        raise NotImplementedError(
            f"attention is not packed: {', '.join(unsupported) or 'mask or missing layout'}"
        )
    causal = _causal(module, is_causal)
    reach = int(sliding_window) - 1 if sliding_window else None
    # NOTE: the kernel attends to whole sequences; batches with unseen tokens take the masked way.
    if packed_kernel is not None and packed_layout.seen is None:
        return packed_kernel(query, key, value, packed_layout, scaling, causal, reach), None
    return attend_runs(query, key, value, packed_layout, scaling, causal, reach), None


def _causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a token sees only earlier ones, by the same rules as transformers' own sdpa function."""
    if getattr(getattr(module, "config", None), "is_causal", None) is False:
        return False
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


AttentionInterface.register(PACKED, packed_attention)
