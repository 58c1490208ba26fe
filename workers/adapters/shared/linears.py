"""Linear layers on CPU with weights in oneDNN's layout.

torch computes a float32 `linear` with its BLAS, which on some processors is half as fast as oneDNN with weights in
oneDNN's blocked layout. At load, each shape of layer runs both ways on random rows. Where the results agree and oneDNN
is faster, the layers of that shape are replaced. Otherwise, and where torch lacks the operators, the layers stay.

A trial has as many rows as a batch if that is cheap: the gain grows with the rows, and short trials are decided by
chance. Models that generate compute few rows at a time, and oneDNN may lose there. Their trials have those numbers of
rows, and several layers of a shape in turn, since the processor's caches would hold the weights of a single layer.
Layers of a small model also keep their plain weight for a single row, where oneDNN is not faster with one. Processor
time of the calling thread counts, as other work on the machine affects that time least. Short trials are repeated.

What the trials choose is remembered (`workers.device.findings`) by the shapes of the layers and the machine. A later
load of such layers lays them out at once. Each load checks on a few rows that both forms give the same numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from statistics import geometric_mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.device.findings import Findings

log = logging.getLogger(__name__)

TRIAL_ROWS = (256, 2048)
"""Fewest and most rows of a trial."""
TRIAL_PRODUCTS = 1 << 29
"""Multiplications of one run of a trial, about 10 ms of a core."""
TRIALS, TRIAL_S, MOST_TRIALS = 5, 0.03, 20
"""Runs of a form: at least so many; with few rows then until they took so many seconds, and at most so many."""
TRIAL_NBYTES = 64 << 20
"""Weights of one shape in a trial of few rows, which exceed the caches of most processors."""
KEPT_NBYTES = 1 << 30
"""Models with more weights in linear layers do not keep both forms of a layer."""
LEAST_GAIN, MOST_LOSS = 1.10, 0.95
"""The mean gain that is worth a change, and the least gain at any number of rows.

The mean gain is above what a busy machine adds to a trial by chance, so that loads of one model choose alike.
"""
GENERATED_ROWS = (1, 8, 32)
"""Sequences that a model generates for at a time."""
PLAIN, LAID_OUT, BOTH = "plain", "laid out", "both"
"""What becomes of the layers of a shape; with both forms a single row meets the plain one."""
CHECKED_ROWS = 8
"""Rows of the check where the choice is remembered."""
FORM = (
    TRIAL_ROWS,
    TRIAL_PRODUCTS,
    TRIALS,
    TRIAL_S,
    MOST_TRIALS,
    TRIAL_NBYTES,
    KEPT_NBYTES,
    LEAST_GAIN,
    MOST_LOSS,
)
"""Facts of the trials on which choices depend."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

Kind = tuple[int, int, str, bool]
"""Numbers of inputs and outputs, dtype, and whether there is a bias."""


class LaidOutLinear(nn.Module):
    """`nn.Linear` for inference with the weight in oneDNN's layout; `weight` has shape and dtype but no data.

    A layer that `keeps_plain` computes a single row with the plain weight.
    """

    _plain: Tensor | None

    def __init__(self, linear: nn.Linear, *, keeps_plain: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._run = torch.ops.mkldnn._linear_pointwise
        # NOTE: a buffer, so that the memory of the model counts this form too.
        self.register_buffer("_plain", linear.weight.detach() if keeps_plain else None, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self._plain is not None and rows.numel() == self.in_features:
            return F.linear(rows, self._plain, self.bias)
        result: Tensor = self._run(rows, self._laid_out, self.bias, "none", [], "")
        return result


@torch.inference_mode()
def lay_out_linears(
    model: nn.Module,
    rows: Sequence[int] = (),
    progress: Callable[[float], None] = lambda fraction: None,
    findings: Findings | None = None,
) -> int:
    """Replace the linear layers of `model` (eval mode, on CPU) where oneDNN is faster; returns how many.

    `rows` are numbers of rows that the layers will have; without any, the rows of a batch of texts. `progress` is told
    the part of the shapes that are decided. `findings` remember the choices.
    """
    kinds: dict[Kind, list[tuple[nn.Module, str, nn.Linear]]] = {}
    for parent, name, child in _candidates(model):
        kind = (child.in_features, child.out_features, str(child.weight.dtype), child.bias is not None)
        kinds.setdefault(kind, []).append((parent, name, child))
    if not kinds:
        return 0
    findings = findings or Findings()
    facts = (FORM, list(rows), [(kind, len(places)) for kind, places in kinds.items()])
    remembered = findings.read("linears", facts, (PLAIN, LAID_OUT, BOTH), len(kinds))
    nbytes = sum(child.weight.nbytes for places in kinds.values() for *_, child in places)
    choices, replaced = [], 0
    for number, (places, choice) in enumerate(zip_longest(kinds.values(), remembered or ())):
        progress(number / len(kinds))
        layers = [child for *_, child in places]
        if choice is None:
            choice = _chosen(layers, rows, may_keep=nbytes <= KEPT_NBYTES)
        elif choice != PLAIN and not _agrees(layers[0]):
            choice = PLAIN
        choices.append(choice)
        if choice != PLAIN:
            for parent, name, child in places:
                setattr(parent, name, LaidOutLinear(child, keeps_plain=choice == BOTH))
            replaced += len(places)
    if choices != remembered:
        findings.write("linears", facts, choices)
    if replaced:
        log.debug("%d linear layers laid out for oneDNN", replaced)
    return replaced


def _chosen(layers: Sequence[nn.Linear], rows: Sequence[int], *, may_keep: bool) -> str:
    """What trials say of layers of one shape."""
    layers = layers[: -(-TRIAL_NBYTES // layers[0].weight.nbytes)]
    keeps_plain = 1 in rows and may_keep and not _is_better(layers, (1,))
    if not _is_better(layers, [count for count in rows if count > 1] if keeps_plain else rows):
        return PLAIN
    return BOTH if keeps_plain else LAID_OUT


def _candidates(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers on CPU whose weights are their own, with their places.

    A head that shares the table of embeddings stays: a second form of the table would double its memory.
    """
    dtypes = laid_out_dtypes()
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[parameter.data_ptr()] = counts.get(parameter.data_ptr(), 0) + 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.dtype not in dtypes:
                continue
            if child.weight.device.type == "cpu" and counts[child.weight.data_ptr()] == 1:
                yield parent, name, child


def laid_out_dtypes() -> frozenset[torch.dtype]:
    """The types of weights that oneDNN can lay out here. bfloat16 needs abilities that not every CPU has."""
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(operators, name) for name in names):
        return frozenset()
    return frozenset(TOLERANCE) if operators._is_mkldnn_bf16_supported() else frozenset((torch.float32,))


def _states(layer: nn.Linear, count: int) -> Tensor:
    """`count` random rows, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, layer.in_features, generator=generator).to(layer.weight.dtype)


def _agrees(layer: nn.Linear, states: Tensor | None = None, other: LaidOutLinear | None = None) -> bool:
    """Whether the laid-out form of a layer gives the numbers of the plain one."""
    states = _states(layer, CHECKED_ROWS) if states is None else states
    try:
        other = LaidOutLinear(layer) if other is None else other
        expected, got = layer(states).detach().float(), other(states).detach().float()
    except RuntimeError as error:
        log.debug("oneDNN layout is not used: %s", str(error).partition("\n")[0])
        return False
    return float((got - expected).abs().max()) <= TOLERANCE[layer.weight.dtype] * float(expected.abs().max())


def _is_better(layers: Sequence[nn.Linear], rows: Sequence[int]) -> bool:
    """Whether the laid-out forms of layers of one shape agree with the plain ones and are faster."""
    first = layers[0]
    least, most = TRIAL_ROWS
    batch = min(most, max(least, TRIAL_PRODUCTS // (first.in_features * first.out_features)))
    states = _states(first, batch)
    try:
        others = [LaidOutLinear(layer) for layer in (layers if rows else layers[:1])]
    except RuntimeError as error:
        log.debug("oneDNN layout is not used: %s", str(error).partition("\n")[0])
        return False
    if not _agrees(first, states, others[0]):
        return False
    gains = []
    for count in rows or (batch,):
        near = states[:count]
        plain, laid_out = _best_s(
            lambda near=near: [layer(near) for layer in layers[: len(others)]],  # type: ignore[misc]
            lambda near=near: [other(near) for other in others],  # type: ignore[misc]
            trial_s=TRIAL_S if rows else 0.0,
        )
        gains.append(plain / laid_out)
    return geometric_mean(gains) > LEAST_GAIN and min(gains) > MOST_LOSS


def _best_s(*runs: Callable[[], object], trial_s: float) -> list[float]:
    """Least processor time of each run, in seconds. The runs take turns, so that a disturbance affects all."""
    best = [float("inf")] * len(runs)
    trials, spent = 0, 0.0
    while trials < TRIALS or (trials < MOST_TRIALS and spent < trial_s * len(runs)):
        for at, run in enumerate(runs):
            began = time.thread_time()
            run()
            took = time.thread_time() - began
            best[at], spent = min(best[at], took), spent + took
        trials += 1
    return best
