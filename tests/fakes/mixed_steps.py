"""One packed step over a cache of random numbers: a single token, the middle of a prompt, and the start of one."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from tests.fakes.generating import KeptOutput, request_of
from workers.generation.attention import PagedAttention, attend_with, packed_pass
from workers.generation.kernel_decoder import KernelDecoder
from workers.generation.scheduler import Sequence, Span
from workers.generation.step_plan import Plan, plan_of

SPANS = ((9, 10), (3, 8), (0, 3))
"""The tokens of each sequence that the step computes."""
BLOCKS = ([7, 2, 4], [1, 5], [3])
TOTAL, SIZE = 9, 4
"""Blocks of the cache, and tokens of a block; blocks 0, 6 and 8 belong to no sequence."""
KEPT = (0, 5, 8)
"""The last row of each sequence."""


class Step(NamedTuple):
    """The logits of `KEPT` rows, and the cache [layers, keys and values, slots, heads, dim] behind the step."""

    logits: torch.Tensor
    cache: torch.Tensor


class MixedSteps:
    """The step of one model, by its modules and by kernels."""

    def __init__(self, model: Any, kernels: Any) -> None:
        """Raises as `KernelDecoder` does."""
        self.attention, self._model = PagedAttention(SIZE), model
        attend_with(model, self.attention.name)
        ids = torch.arange(5, 9, device=model.device)[None]
        with torch.inference_mode():
            model(
                input_ids=ids,
                position_ids=torch.arange(4, device=model.device)[None],
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            )
        self.attention.allocate(TOTAL)
        self.attention.decoder = KernelDecoder(model, self.attention, kernels)

    def run(self, by_kernels: bool) -> Step:
        """The step over the same cache each time."""
        cells = [self.attention.cells(layer) for layer in sorted(self.attention.formulas)]
        generator = torch.Generator().manual_seed(3)
        for each in (states for pair in cells for states in pair):
            each.copy_(torch.randn(each.shape, generator=generator))
        keep = torch.tensor(KEPT, device=self._model.device)
        with torch.inference_mode():
            logits = packed_pass(self._model, self.attention, self._plan(), keep, hooked=not by_kernels)
        return Step(logits.float(), torch.stack([torch.stack(pair) for pair in cells]).float())

    def written(self) -> list[int]:
        """The slots of the step's rows."""
        slots: list[int] = self._plan().slots.tolist()
        return slots

    def _plan(self) -> Plan:
        spans = []
        for number, ((start, stop), blocks) in enumerate(zip(SPANS, BLOCKS, strict=True)):
            request = request_of(number, random.Random(number).choices(range(5, 300), k=stop))
            sequence = Sequence(request, 0, number, KeptOutput(request, 0))
            sequence.blocks = blocks
            spans.append(Span(sequence, start, stop))
        return plan_of(spans, SIZE, self._model.device)


def with_drawn_norms(model: Any) -> Any:
    """A model whose norms scale each number in another way."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn(weight.shape, generator=generator).to(weight) * 0.3)
    return model
