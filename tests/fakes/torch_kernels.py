"""The kernels of a layer in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from workers.generation.fused import Cells, HeadRows, NormForm


class TorchKernels:
    """As `workers.generation.fused.Kernels`; `error` is added to what a kernel of this name gives."""

    def __init__(self, **error: float) -> None:
        self._error = error
        self.calls: list[str] = []

    def norm(self, form: NormForm, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("norm")
        return self._normed(form, x, self._error.get("norm", 0.0))

    def add_norm(
        self,
        form: NormForm,
        hidden: torch.Tensor,
        more: torch.Tensor,
        behind: NormForm | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append("add_norm")
        total = hidden + (more if behind is None else self._normed(behind, more, 0.0))
        if rows is None:
            hidden.copy_(total)
        return self._normed(form, total if rows is None else total[rows], self._error.get("add_norm", 0.0))

    def turn(
        self,
        heads: HeadRows,
        turns: tuple[torch.Tensor, torch.Tensor],
        cells: Cells,
        norms: tuple[NormForm, NormForm] | None,
    ) -> None:
        self.calls.append("turn")
        width = turns[0].shape[-1]
        cosines, sines = (each[:, None] for each in turns)
        for states, form in zip(heads[:2], norms or (None, None), strict=True):
            normed = states if form is None else self._normed(form, states, 0.0)
            near, rest = normed[..., :width], normed[..., width:]
            low, high = near.chunk(2, dim=-1)
            turned = near * cosines + torch.cat((-high, low), dim=-1) * sines
            states.copy_(torch.cat((turned + self._error.get("turn", 0.0), rest), dim=-1))
        cells.keys[cells.slots], cells.values[cells.slots] = heads.k, heads.v

    def gated(self, gates: torch.Tensor, ups: torch.Tensor, tanh: bool) -> torch.Tensor:
        self.calls.append("gated")
        active = F.gelu(gates, approximate="tanh") if tanh else F.silu(gates)
        return active * ups + self._error.get("gated", 0.0)

    @staticmethod
    def _normed(form: NormForm, x: torch.Tensor, error: float) -> torch.Tensor:
        near = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + form.epsilon)
        near = near.to(x.dtype).float() if form.late else near
        found: Any = near * (form.weight.float() + form.offset) + error
        return found.to(x.dtype)  # type: ignore[no-any-return]
