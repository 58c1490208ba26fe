"""torch's variable-length attention behind one call, for every torch that has scale and windows.

torch 2.10 has `is_causal` only. Later versions have `scale` and `window_size`. 2.12 adds `enable_gqa` and `num_splits`,
and `seqused_k` and `block_table` for keys in pages. The signature is read once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

HALF = (torch.float16, torch.bfloat16)
"""The precisions that the kernels take."""


class Bounds(NamedTuple):
    """Where each sequence begins and ends: cumulative lengths int32 [n + 1], and the greatest length.

    `cu_keys` is None for keys in pages whose kernel counts the keys by `seqused_k` alone.
    """

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor | None
    max_queries: int
    max_keys: int


class VarlenFunction:
    """`varlen_attn` without differences between versions."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the arguments of `function`; raises NotImplementedError if it lacks `scale` or `window_size`."""
        self._function, self._offered = function, frozenset(inspect.signature(function).parameters)
        self.require("scale", "window_size")
        # PERF: one split per sequence also makes a text's result independent of its batch.
        self._fixed: dict[str, Any] = {"num_splits": 1} if "num_splits" in self._offered else {}

    def require(self, *arguments: str) -> None:
        """Raise NotImplementedError if the function lacks one of the arguments."""
        missing = [name for name in arguments if name not in self._offered]
        if missing:
            raise NotImplementedError(f"this torch's varlen_attn has no {', '.join(missing)}")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: Bounds,
        scaling: float | None,
        window_size: tuple[int, int],
        **pages: torch.Tensor,
    ) -> torch.Tensor:
        """q [tokens, heads, dim] to the same shape.

        k and v are [tokens, key heads, dim], or [pages, tokens, key heads, dim] with `seqused_k` and `block_table`.
        `window_size` are the keys seen to the left and right, -1 for all.
        """
        arguments = {**self._fixed, **pages}
        groups = q.shape[1] // k.shape[-2]
        if groups > 1 and "enable_gqa" in self._offered:
            arguments["enable_gqa"] = True
        elif groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out: torch.Tensor = self._function(
            q,
            k,
            v,
            bounds.cu_queries,
            bounds.cu_keys,
            bounds.max_queries,
            bounds.max_keys,
            scale=scaling,
            window_size=window_size,
            **arguments,
        )
        return out
