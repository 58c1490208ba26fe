"""A model that generates text out of quantised weights, which become numbers of the model's precision one by one.

1. `workers.loading.quantized_files` has held names, types and shapes of all tensors against the format.
2. transformers builds the model without memory and asks for each weight once, as for GGUF files. A weight is read,
   turned into numbers in float32, rounded to the model's precision, and its packed form is dropped.
3. What the model lacks, and what has no place in it, is refused as for weights that are no integers.

The products are those of plain numbers: such a checkpoint saves the download, not the memory.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from workers.adapters.base import LoadContext
from workers.adapters.shared import checkpoint
from workers.adapters.shared.building import BUILDING, WeightCount
from workers.loading.quantized_files import Part, Plan, QuantizedRefused, Scheme, Weight
from workers.loading.reading import safe_open

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs stands in each four bits of a word, from the lowest on."""


def load(context: LoadContext, plan: Plan, config: Any, *, sees: bool) -> Any:
    """The model in eval mode on the device, in the context's precision; reports the phase "weights".

    Raises `QuantizedRefused` for models of code of their own and for groups that do not exist, and `CheckpointError`
    for weights that do not make up the model.
    """
    table: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in table:
        raise QuantizedRefused(
            f"{plan.scheme.method}: quantised weights of {type(config).__name__}, which transformers does not bring, "
            "are not read"
        )
    transformers_logging.disable_progress_bar()
    checkpoint.refuse_layers_without_weights(config, context.directory)
    del config.quantization_config
    count, turn = WeightCount(plan.values, context.progress), threading.Lock()
    made: dict[str, Any] = {
        name: _Numbers(plan.scheme, weight, context.dtype, count, turn)
        for name, weight in plan.quantized.items()
    }
    made |= {name: _Plain(part, count) for name, part in plan.plain.items()}
    with BUILDING, count.raising():
        model, report = table[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=made,
            dtype=context.dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    checkpoint.refuse_unfitting(model, report)
    if (context.directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(
            str(context.directory), local_files_only=True
        )
    model.config.use_cache = False
    context.progress("weights", 1.0)
    return model.to(context.device).eval().requires_grad_(False)


class _Plain:
    """A tensor that is stored as it is, read when indexed."""

    def __init__(self, part: Part, count: WeightCount) -> None:
        self._part, self._count = part, count

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._count.make(lambda: _read(self._part))


class _Numbers:
    """A quantised weight, made when indexed. All weights of a model take turns by one lock.

    transformers makes weights in threads, of which each would hold a packed weight and its numbers in float32.
    """

    def __init__(
        self, scheme: Scheme, weight: Weight, dtype: torch.dtype, count: WeightCount, turn: threading.Lock
    ) -> None:
        self._scheme, self._weight, self._dtype, self._count, self._turn = scheme, weight, dtype, count, turn

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._turn:
            return self._count.make(lambda: dequantized(self._scheme, self._weight).to(self._dtype))


def _read(part: Part) -> torch.Tensor:
    with safe_open(str(part.file), "pt") as file:
        tensor: torch.Tensor = file.get_tensor(part.name)
    return tensor


def dequantized(scheme: Scheme, weight: Weight) -> torch.Tensor:
    """The numbers of a weight, float32 [outer, inner]. Raises `QuantizedRefused` for a group that does not exist."""
    tensors = {end: _read(part) for end, part in weight.parts.items()}
    if scheme.method == "fp8":
        return _from_fp8(tensors["weight"], tensors["scale"].float(), scheme.block)
    zeros = _unpacked(tensors["qzeros"], scheme.bits)
    if scheme.method == "awq":
        numbers, zeros = (_in_order(each) for each in (_unpacked(tensors["qweight"], 4), zeros))
    else:
        # Words pack inputs, which are rows: unpacked [outer, inner], then turned.
        numbers = _unpacked(tensors["qweight"].T, scheme.bits).T
        zeros = (zeros + scheme.zero_offset) & ((1 << scheme.bits) - 1)
    inner = weight.shape[1]
    groups = tensors.get("g_idx")
    if groups is None:
        groups = torch.arange(inner) // (scheme.group or inner)
    else:
        groups = groups.long()
        least, most = int(groups.min()), int(groups.max())
        if least < 0 or most >= zeros.shape[0]:
            raise QuantizedRefused(
                f"{scheme.method}: {weight.parts['g_idx'].name} has groups from {least} to {most}, and there are "
                f"{zeros.shape[0]} groups"
            )
    # PERF: in place, so that a weight takes twice its float32 numbers at most.
    result = numbers.float()
    del numbers
    result -= zeros.float()[groups]
    result *= tensors["scales"].float()[groups]
    return result.T.contiguous()


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers of words int32 [rows, words], lowest bits first: int16 [rows, words * 32 / bits]."""
    mask = (1 << bits) - 1
    pieces = [((words >> shift) & mask).to(torch.int16) for shift in range(0, 32, bits)]
    return torch.stack(pieces, -1).flatten(1)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """The outputs of AWQ [rows, outer] in their order, by the order in which words hold them."""
    place = sorted(range(len(_AWQ_COLUMNS)), key=_AWQ_COLUMNS.__getitem__)
    return values.unflatten(1, (-1, len(place)))[:, :, place].flatten(1)


def _from_fp8(stored: torch.Tensor, scale: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    numbers = stored.float()
    if not block:
        return numbers.mul_(scale.reshape(()))
    for row, scales in enumerate(scale):
        columns = scales.repeat_interleave(block[1])[: numbers.shape[1]]
        numbers[row * block[0] : (row + 1) * block[0]] *= columns
    return numbers
