"""Norms and gates of a model in one kernel each, where transformers' modules launch up to seven.

1. `fuse` looks for modules of the two forms by what they hold: a norm has a weight and an epsilon, a gated layer has
   `gate_proj`, `up_proj`, `down_proj` and a known activation. Their code need not be known.
2. Each module is compared with its kernel on rows of its own width. A module whose kernel differs keeps its own form.
3. The projections of a gated layer are called as modules, so adapters and other forms of weights stay what they are.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from workers.device.oom import end_if_broken, is_out_of_memory
from workers.device.varlen import HALF

log = logging.getLogger(__name__)

_EPSILONS = ("variance_epsilon", "eps")
_FORMS = ((0.0, True), (1.0, False), (0.0, False), (1.0, True))
"""Offset of the weight, and whether a row is rounded before the weight: Llama's and Gemma's form, then mixtures."""
_WIDEST = 16384
_TILE = 1024
_SIZES, _MEAN = (0.3, 1.0, 3.0, 30.0, 300.0), 0.5
"""What the rows of a comparison are multiplied by, and their mean before.

Large rows find modules that limit their gates, and a mean other than 0 finds norms that take the mean away.
"""
_SILU = ("SiLU", "SiLUActivation")
_TANH = ("GELUTanh", "PytorchGELUTanh")
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Greatest difference, as a part of the greatest number of the row: two steps of rounding."""


class Kernels:
    """The programs of `step_kernels`. Raises ImportError without Triton."""

    def __init__(self) -> None:
        from workers.generation.step_kernels import gate, normalize

        self._gate, self._normalize = gate, normalize

    def norm(
        self, weight: torch.Tensor, epsilon: float, offset: float, late: bool, x: torch.Tensor
    ) -> torch.Tensor:
        """The norm of x [..., width] with weight [width]."""
        width = x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        padded = 1 << (width - 1).bit_length()
        self._normalize[x.numel() // width,](
            x, weight, out, epsilon, WIDTH=width, PADDED=padded, OFFSET=offset, LATE=late
        )
        return out

    def gated(self, gates: torch.Tensor, ups: torch.Tensor, tanh: bool) -> torch.Tensor:
        """The activation of `gates` times `ups`, of one shape."""
        gates, ups = gates.contiguous(), ups.contiguous()
        out, count = torch.empty_like(gates), gates.numel()
        self._gate[-(-count // _TILE),](gates, ups, out, count, TILE=_TILE, TANH=tanh)
        return out


def fuse(model: Any) -> int:
    """Give the modules of a model on CUDA in half precision their kernels; returns how many have one."""
    if model.device.type != "cuda" or model.dtype not in HALF:
        return 0
    try:
        kernels = Kernels()
    except ImportError as error:
        log.info("norms and gates keep their own form: %s", error)
        return 0
    return fuse_with(model, kernels)


@torch.inference_mode()
def fuse_with(model: Any, kernels: Kernels) -> int:
    """As `fuse`, on any device on which `kernels` run."""
    count, refused = 0, dict[str, str]()
    for module in model.modules():
        forms = _forms_of(module, kernels, model.dtype)
        if not forms or type(module).__name__ in refused:
            continue
        try:
            chosen = _chosen(module, forms, model)
        # NOTE: Triton raises RuntimeError without a C compiler, and ValueError or TypeError for another version.
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            end_if_broken(error)
            if is_out_of_memory(error):
                raise
            refused[type(module).__name__] = str(error).partition("\n")[0]
            continue
        module.forward, count = chosen, count + 1
    for name, reason in refused.items():
        log.info("%s keeps its own form: %s", name, reason)
    return count


def _forms_of(
    module: nn.Module, kernels: Kernels, dtype: torch.dtype
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """What may take the place of a module's `forward`, which takes one tensor of `dtype`."""
    # NOTE: a module with a `forward` of its own has been changed by somebody else already.
    if "forward" in vars(module) or len(inspect.signature(type(module).forward).parameters) != 2:
        return []
    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        activation = type(module.act_fn).__name__
        if activation not in (*_SILU, *_TANH) or not isinstance(_width_of(module), int):
            return []
        return [partial(_gated, module, kernels, activation in _TANH)]
    epsilon = next((value for name in _EPSILONS if isinstance(value := vars(module).get(name), float)), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.numel() > _WIDEST:
        return []
    if epsilon is None or weight.dtype != dtype or getattr(module, "bias", None) is not None:
        return []
    return [partial(kernels.norm, weight, epsilon, offset, late) for offset, late in _FORMS]


def _gated(module: Any, kernels: Kernels, tanh: bool, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.down_proj(kernels.gated(module.gate_proj(x), module.up_proj(x), tanh))
    return found


def _width_of(module: Any) -> Any:
    """Numbers in a row that a module takes; None where nobody can tell."""
    if hasattr(module, "gate_proj"):
        return getattr(module.gate_proj, "in_features", None)
    return module.weight.shape[-1]


def _chosen(
    module: Any, forms: list[Callable[[torch.Tensor], torch.Tensor]], model: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The form that agrees best with the module. Raises RuntimeError where none agrees."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, len(_SIZES), _width_of(module), generator=generator) + _MEAN
    rows = (rows * torch.tensor(_SIZES)[:, None]).to(model.device, model.dtype)
    wanted = module(rows).float()
    errors = [_error(form(rows).float(), wanted) for form in forms]
    least = min(errors)
    if least > _TOLERANCE[model.dtype]:
        raise RuntimeError(f"the kernel differs by {least:.2g} of the greatest number of a row")
    return forms[errors.index(least)]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The greatest difference within a row, as a part of the row's greatest number; rows that overflow tell nothing."""
    sizes = wanted.abs().amax(-1)
    told = sizes.isfinite()
    if not told.any():
        return math.inf
    differences = (found - wanted).abs().amax(-1)[told] / sizes[told].clamp_(min=1e-30)
    return float(differences.nan_to_num(nan=math.inf).max())
