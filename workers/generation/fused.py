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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from workers.device.oom import obstacle_of
from workers.device.varlen import HALF

log = logging.getLogger(__name__)
T = TypeVar("T")

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


class NormForm(NamedTuple):
    """A root mean square norm: weight [width], `offset` + weight scale a row, which is rounded before with `late`."""

    weight: torch.Tensor
    epsilon: float
    offset: float
    late: bool


class HeadRows(NamedTuple):
    """The rows of a step by heads: queries [rows, heads, dim], keys and values [rows, key heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Cells(NamedTuple):
    """The cache of one layer, keys and values [slots, key heads, dim], and the slots int64 [rows] of a step's rows."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor


class Kernels:
    """The programs of `step_kernels`. Raises ImportError without Triton."""

    def __init__(self) -> None:
        from workers.generation import step_kernels

        self._programs: Any = step_kernels

    def norm(self, form: NormForm, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., width]."""
        width = x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        self._programs.normalize[x.numel() // width,](
            x,
            form.weight,
            out,
            form.epsilon,
            WIDTH=width,
            PADDED=_power(width),
            OFFSET=form.offset,
            LATE=form.late,
            num_warps=_warps(width),
        )
        return out

    def add_norm(
        self,
        form: NormForm,
        hidden: torch.Tensor,
        more: torch.Tensor,
        behind: NormForm | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The norm of hidden + more, both [rows, width]; `hidden` becomes the sum, unless there are `rows`.

        `behind` norms what is added. `rows` int64 [kept] are those whose norms [kept, width] are asked for.
        """
        count, width = hidden.shape
        more = more.contiguous()
        out = torch.empty_like(hidden) if rows is None else hidden.new_empty(len(rows), width)
        after = behind or form
        self._programs.add_normalize[count if rows is None else len(rows),](
            hidden,
            more,
            after.weight,
            form.weight,
            more if rows is None else rows,
            out,
            after.epsilon,
            form.epsilon,
            WIDTH=width,
            PADDED=_power(width),
            OFFSET=form.offset,
            LATE=form.late,
            BEHIND=behind is not None,
            BEHIND_OFFSET=after.offset,
            BEHIND_LATE=after.late,
            PICKS=rows is not None,
            num_warps=_warps(width),
        )
        return out

    def turn(
        self,
        heads: HeadRows,
        turns: tuple[torch.Tensor, torch.Tensor],
        cells: Cells,
        norms: tuple[NormForm, NormForm] | None,
    ) -> None:
        """Turn q and k in place by cosines and sines [rows, turned], and write k and v to their cells of the cache.

        `norms` of each head of q and k come first; both have one offset and order of rounding. Heads of a row lie side
        by side.
        """
        cosines, sines = turns
        (rows, count, dim), key_heads = heads.q.shape, heads.k.shape[1]
        turned = cosines.shape[-1]
        q_norm, k_norm = norms or (NormForm(heads.q, 0.0, 0.0, False),) * 2
        self._programs.turn[rows, count + 2 * key_heads](
            *heads,
            cosines.contiguous(),
            sines.contiguous(),
            cells.slots,
            cells.keys,
            cells.values,
            q_norm.weight,
            k_norm.weight,
            q_norm.epsilon,
            k_norm.epsilon,
            *(states.stride(0) for states in heads),
            HEADS=count,
            KEY_HEADS=key_heads,
            DIM=dim,
            PADDED=_power(dim),
            TURNED=turned,
            PADDED_HALF=_power(turned // 2),
            PADDED_REST=_power(dim - turned),
            NORM=norms is not None,
            OFFSET=q_norm.offset,
            LATE=q_norm.late,
            num_warps=1,
        )

    def gated(self, gates: torch.Tensor, ups: torch.Tensor, tanh: bool) -> torch.Tensor:
        """The activation of `gates` times `ups`, of one shape [..., width]; both may be columns of wider rows."""
        shape, width = gates.shape, gates.shape[-1]
        gates, ups = gates.reshape(-1, width), ups.reshape(-1, width)
        out = gates.new_empty(gates.shape)
        self._programs.gate[len(gates), -(-width // _TILE)](
            gates, ups, out, gates.stride(0), ups.stride(0), WIDTH=width, TILE=_TILE, TANH=tanh
        )
        return out.view(shape)


def _power(size: int) -> int:
    """The next power of two, the number of places that a program has."""
    return 1 << (max(1, size) - 1).bit_length()


def _warps(width: int) -> int:
    """Groups of 32 threads for a row of a norm: eight numbers a thread."""
    return max(1, min(16, _power(width) // 256))


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
        except Exception as error:
            refused[type(module).__name__] = obstacle_of(error)
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
        tanh = is_tanh(module.act_fn)
        if tanh is None or not isinstance(_width_of(module), int):
            return []
        return [partial(_gated, module, kernels, tanh)]
    return [partial(kernels.norm, form) for form in forms_of_norm(module, dtype)]


def forms_of_norm(module: nn.Module, dtype: torch.dtype) -> list[NormForm]:
    """The forms that a norm whose weight has `dtype` may have; none for another module."""
    epsilon = next((value for name in _EPSILONS if isinstance(value := vars(module).get(name), float)), None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.numel() > _WIDEST:
        return []
    if epsilon is None or weight.dtype != dtype or getattr(module, "bias", None) is not None:
        return []
    return [NormForm(weight, epsilon, offset, late) for offset, late in _FORMS]


def is_tanh(activation: Any) -> bool | None:
    """Whether an activation is the GELU by a hyperbolic tangent, or SiLU; None for another one."""
    name = type(activation).__name__
    return name in _TANH if name in (*_SILU, *_TANH) else None


def _gated(module: Any, kernels: Kernels, tanh: bool, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.down_proj(kernels.gated(module.gate_proj(x), module.up_proj(x), tanh))
    return result


def _width_of(module: Any) -> Any:
    """Numbers in a row that a module takes; None where nobody can tell."""
    if hasattr(module, "gate_proj"):
        return getattr(module.gate_proj, "in_features", None)
    return module.weight.shape[-1]


def _chosen(
    module: Any, forms: list[Callable[[torch.Tensor], torch.Tensor]], model: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The form that agrees best with the module. Raises RuntimeError where none agrees."""
    rows = rows_of_proof(_width_of(module), model)[None]
    wanted = module(rows)
    return best((form, form(rows), wanted) for form in forms)


def rows_of_proof(width: int, model: Any) -> torch.Tensor:
    """Rows [rows, width] of small, large and shifted numbers, on the device and in the precision of a model."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(_SIZES), width, generator=generator) + _MEAN
    return (rows * torch.tensor(_SIZES)[:, None]).to(model.device, model.dtype)


def best(tried: Iterable[tuple[T, torch.Tensor, torch.Tensor]]) -> T:
    """Of some things, each with what it found and what was wanted, the one that agrees best.

    Raises RuntimeError where none agrees to two steps of rounding.
    """
    errors = [
        (_error(found.float(), wanted.float()), one, _TOLERANCE[wanted.dtype]) for one, found, wanted in tried
    ]
    if not errors:
        raise RuntimeError("there is no kernel of this form")
    least, chosen, tolerance = min(errors, key=lambda each: each[0])
    if least > tolerance:
        raise RuntimeError(f"the kernel differs by {least:.2g} of the greatest number of a row")
    return chosen


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The greatest difference within a row, as a part of the row's greatest number; rows that overflow tell nothing."""
    sizes = wanted.abs().amax(-1)
    finite = sizes.isfinite()
    if not finite.any():
        return math.inf
    differences = (found - wanted).abs().amax(-1)[finite] / sizes[finite].clamp_(min=1e-30)
    return float(differences.nan_to_num(nan=math.inf).max())
