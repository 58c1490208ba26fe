"""torch's variable-length attention kernel, with the arguments the installed torch offers.

torch 2.10 has `is_causal` only; later versions have `scale` and `window_size`, and 2.12 adds `enable_gqa` and
`num_splits`.  The signature is read once.  `select_kernel` compares the kernel with scaled_dot_product_attention
on a small case and returns None wherever it is missing or differs, so callers always have a working path.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from workers.adapters.shared.packing import Layout, TokenSequence, pack
from workers.adapters.shared.sdpa_runs import attend_runs

log = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)


class VarlenKernel:
    """`varlen_attn` behind one fixed call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the arguments of `function`; raises NotImplementedError if it lacks `scale` or `window_size`."""
        self._function = function
        offered = inspect.signature(function).parameters
        missing = [name for name in ("scale", "window_size") if name not in offered]
        if missing:
            raise NotImplementedError(f"this torch's varlen_attn has no {', '.join(missing)}")
        self._has_gqa = "enable_gqa" in offered
        # PERF: one split per sequence also makes a text's result independent of its batch.
        self._fixed: dict[str, Any] = {"num_splits": 1} if "num_splits" in offered else {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        scaling: float | None,
        causal: bool,
        reach: int | None,
    ) -> torch.Tensor:
        """Attention within each sequence; shapes as in `attention.packed_attention`."""
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        arguments = dict(self._fixed)
        if q.shape[1] != k.shape[1]:
            if self._has_gqa:
                arguments["enable_gqa"] = True
            else:
                groups = q.shape[1] // k.shape[1]
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        side = -1 if reach is None else reach
        out: torch.Tensor = self._function(
            q,
            k,
            v,
            layout.cu_seq_lens,
            layout.cu_seq_lens,
            layout.max_len,
            layout.max_len,
            scale=scaling,
            window_size=(side, 0 if causal else side),
            **arguments,
        )
        return out.unsqueeze(0)


@functools.cache
def select_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> VarlenKernel | None:
    """The kernel for this device, dtype and head shape, or None where SDPA per run has to do."""
    if device.type != "cuda" or dtype not in HALF:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn

        kernel = VarlenKernel(varlen_attn)
        _check(kernel, device, dtype, heads, kv_heads, head_dim)
    except (ImportError, RuntimeError, ValueError, TypeError) as error:
        log.warning("variable-length attention is not used: %s", str(error).splitlines()[0])
        return None
    return kernel


def _check(
    kernel: VarlenKernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Compare with SDPA: full, causal, windowed, both.  Raises RuntimeError where they differ."""
    lens = (1, 7, 7, 40)
    layout = pack([TokenSequence(ids=torch.zeros(n, dtype=torch.int64).numpy()) for n in lens]).layout.to(
        device
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, count, sum(lens), head_dim), generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    for causal in (False, True):
        for reach in (None, 3):
            got = kernel(query, key, value, layout, head_dim**-0.5, causal, reach)
            want = attend_runs(query, key, value, layout, head_dim**-0.5, causal, reach)
            if not torch.allclose(got.float(), want.float(), atol=3e-2, rtol=3e-2):
                raise RuntimeError(f"varlen_attn differs from SDPA (causal={causal}, window={reach})")
