"""The kernels of norms and gates in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchKernels:
    """As `workers.generation.fused.Kernels`; `error` is added to what a kernel of this name gives."""

    def __init__(self, **error: float) -> None:
        self._error = error
        self.calls: list[str] = []

    def norm(
        self, weight: torch.Tensor, epsilon: float, offset: float, late: bool, x: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append("norm")
        near = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
        near = near.to(x.dtype).float() if late else near
        return (near * (weight.float() + offset) + self._error.get("norm", 0.0)).to(x.dtype)

    def gated(self, gates: torch.Tensor, ups: torch.Tensor, tanh: bool) -> torch.Tensor:
        self.calls.append("gated")
        active = F.gelu(gates, approximate="tanh") if tanh else F.silu(gates)
        return active * ups + self._error.get("gated", 0.0)
