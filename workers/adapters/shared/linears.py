"""Linear layers on CPU with weights in oneDNN's layout.

torch computes a float32 `linear` with its BLAS, which on some processors is half as fast as oneDNN with weights in
oneDNN's blocked layout. At load, each shape of layer runs both ways on random rows. Where the results agree and oneDNN
is faster, the layers of that shape are replaced. Otherwise, and where torch lacks the operators, the layers stay.

A trial has as many rows as a batch if that is cheap: the gain grows with the rows, and short trials are decided by
chance. Processor time of the calling thread counts, as other work on the machine affects that time least.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

TRIAL_ROWS = (256, 2048)
"""Fewest and most rows of a trial."""
TRIAL_PRODUCTS = 1 << 29
"""Multiplications of one run of a trial, about 10 ms of a core."""
TRIALS = 5
LEAST_GAIN = 1.05
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class LaidOutLinear(nn.Module):
    """`nn.Linear` for inference with the weight in oneDNN's layout; `weight` has shape and dtype but no data."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._run = torch.ops.mkldnn._linear_pointwise

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        result: Tensor = self._run(rows, self._laid_out, self.bias, "none", [], "")
        return result


@torch.inference_mode()
def lay_out_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` (eval mode, on CPU) where oneDNN is faster; returns how many."""
    dtypes = laid_out_dtypes()
    counts: dict[int, int] = {}
    for parameter in model.parameters():
        counts[parameter.data_ptr()] = counts.get(parameter.data_ptr(), 0) + 1
    verdicts: dict[tuple[int, int, torch.dtype, bool], bool] = {}
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype not in dtypes:
                continue
            if child.weight.device.type != "cpu" or counts[child.weight.data_ptr()] > 1:
                continue
            kind = (child.in_features, child.out_features, child.weight.dtype, child.bias is not None)
            if kind not in verdicts:
                verdicts[kind] = _is_better(child)
            if verdicts[kind]:
                setattr(parent, name, LaidOutLinear(child))
                replaced += 1
    if replaced:
        log.debug("%d linear layers laid out for oneDNN", replaced)
    return replaced


def laid_out_dtypes() -> frozenset[torch.dtype]:
    """The types of weights that oneDNN can lay out here. bfloat16 needs abilities that not every CPU has."""
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return frozenset()
    return frozenset(TOLERANCE) if operators._is_mkldnn_bf16_supported() else frozenset((torch.float32,))


def _is_better(linear: nn.Linear) -> bool:
    """Whether the laid-out form of this layer agrees with the plain one and is faster."""
    generator = torch.Generator().manual_seed(0)
    least, most = TRIAL_ROWS
    count = min(most, max(least, TRIAL_PRODUCTS // (linear.in_features * linear.out_features)))
    rows = torch.randn(count, linear.in_features, generator=generator).to(linear.weight.dtype)
    try:
        candidate = LaidOutLinear(linear)
        wanted, got = linear(rows).detach().float(), candidate(rows).detach().float()
    except RuntimeError as error:
        log.debug("oneDNN layout is not used: %s", str(error).partition("\n")[0])
        return False
    if float((got - wanted).abs().max()) > TOLERANCE[linear.weight.dtype] * float(wanted.abs().max()):
        return False
    plain, laid_out = _best_s(lambda: F.linear(rows, linear.weight, linear.bias), lambda: candidate(rows))
    return plain > LEAST_GAIN * laid_out


def _best_s(*runs: Callable[[], Tensor]) -> list[float]:
    """Least processor time of each run, in seconds. The runs take turns, so that a disturbance affects all."""
    best = [float("inf")] * len(runs)
    for _ in range(TRIALS):
        for at, run in enumerate(runs):
            began = time.thread_time()
            run()
            best[at] = min(best[at], time.thread_time() - began)
    return best
