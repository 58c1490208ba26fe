"""Norms and gates in one kernel each: proven module by module, and refused where the numbers differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from tests.fakes.torch_kernels import TorchKernels
from tests.tiny import causal
from workers.generation.fused import fuse, fuse_with

IDS = torch.arange(5, 25)[None]


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()  # type: ignore[no-any-return]


def norms_and_gates(model: Any) -> int:
    names = [type(module).__name__ for module in model.modules()]
    return sum("RMSNorm" in name or name.endswith("MLP") for name in names)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "qwen3", "olmo2", "granite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_and_gate_of_a_family_has_its_kernel(family: str, dtype: torch.dtype) -> None:
    model, kernels = causal.make(family).to(dtype), TorchKernels()
    plain = logits_of(model)
    assert fuse_with(model, kernels) == norms_and_gates(model)  # type: ignore[arg-type]
    kernels.calls.clear()
    found = logits_of(model)
    assert len(kernels.calls) == norms_and_gates(model)
    assert float((found - plain).abs().max()) <= (1e-5 if dtype == torch.float32 else 0.05) * float(
        plain.abs().max()
    )


@pytest.mark.parametrize("wrong", ["norm", "gated"])
def test_a_kernel_that_differs_is_refused_and_the_module_keeps_its_form(wrong: str) -> None:
    model, kernels = causal.make("llama"), TorchKernels(**{wrong: 0.01})
    plain = logits_of(model)
    assert 0 < fuse_with(model, kernels) < norms_and_gates(model)  # type: ignore[arg-type]
    kernels.calls.clear()
    torch.testing.assert_close(logits_of(model), plain, atol=1e-4, rtol=1e-4)
    assert kernels.calls and wrong not in kernels.calls


class Gated(nn.Module):
    """A norm that takes a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        near = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        return near if gate is None else near * gate


class Model(nn.Module):
    """Modules that look like those with a kernel, and are others."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.gated, self.plain = Gated(), nn.RMSNorm(8, eps=1e-6)
        self.centred, self.half = nn.LayerNorm(8, bias=False), nn.RMSNorm(8, eps=1e-6, dtype=torch.float16)


def test_only_modules_of_one_tensor_and_of_the_precision_of_the_model_have_kernels() -> None:
    model = Model()
    assert fuse_with(model, TorchKernels()) == 1  # type: ignore[arg-type]
    assert "forward" in vars(model.plain)
    assert fuse_with(model, TorchKernels()) == 0, "a module has one kernel"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 4096])
def test_norms_that_take_the_mean_away_keep_their_form(dtype: torch.dtype, width: int) -> None:
    model = Model()
    model.plain = model.half = None  # type: ignore[assignment]
    model.centred = nn.LayerNorm(width, bias=False)
    model.cohere = CohereLayerNorm(width)
    model.dtype = dtype  # type: ignore[misc]
    assert fuse_with(model.to(dtype), TorchKernels()) == 0  # type: ignore[arg-type]


class Limited(nn.Module):
    """A gated layer whose gates are at most `limit`."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down_proj, self.act_fn, self.limit = nn.Linear(128, 64, bias=False), nn.SiLU(), limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(
            self.act_fn(self.gate_proj(x).clamp(max=self.limit)) * self.up_proj(x)
        )
        return found


@pytest.mark.parametrize("limit", [7.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_with_a_limit_keep_their_form(limit: float, dtype: torch.dtype) -> None:
    model = Model()
    model.plain = model.half = Limited(limit)  # type: ignore[assignment]
    model.dtype = dtype  # type: ignore[misc]
    torch.manual_seed(0)
    assert fuse_with(model.to(dtype), TorchKernels()) == (limit == float("inf"))  # type: ignore[arg-type]


def test_models_on_a_processor_keep_their_modules() -> None:
    model = causal.make("llama").to(torch.bfloat16)
    assert fuse(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())
