"""A model that generates text out of quantised weights, which become numbers of the model's precision one by one.

1. `workers.loading.quantized_files` has held names, types and shapes of all tensors against the format.
2. transformers builds the model without memory and asks for each weight once, as for GGUF files. A weight is read,
   turned into numbers in float32, rounded to the model's precision, and its packed form is dropped.
3. What the model lacks, and what has no place in it, is refused as for weights that are no integers.

The products are those of plain numbers: such a checkpoint saves the download, not the memory. With a `Quantizer` linear
layers stay quantised: as they are where the file has the kind that is asked for, else the numbers are quantised anew.
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
from workers.adapters.shared.quantizing import Quantizer
from workers.adapters.shared.stored_numbers import as_stored, dequantized, read
from workers.loading.quantized_files import Plan, refuse_numbers
from workers.loading.quantized_parts import Part, QuantizedRefused, Weight


def _table(*, sees: bool) -> Any:
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING


def brings(config: Any, *, sees: bool) -> bool:
    """Whether transformers brings the model of a configuration."""
    return type(config) in _table(sees=sees)


def load(
    context: LoadContext, plan: Plan, config: Any, *, sees: bool, quantizer: Quantizer | None = None
) -> Any:
    """The model in eval mode on the device, in the context's precision; reports the phase "weights".

    Raises `QuantizedRefused` for models of code of their own and for groups that do not exist, `CheckpointError` for
    weights that do not make up the model, and `LayerNotProven`.
    """
    table = _table(sees=sees)
    if plan.scheme is not None and not brings(config, sees=sees):
        raise QuantizedRefused(
            f"{plan.scheme.method}: quantised weights of {type(config).__name__}, which transformers does not bring, "
            "are not read"
        )
    transformers_logging.disable_progress_bar()
    checkpoint.refuse_layers_without_weights(config, context.directory)
    if plan.scheme is not None:
        refuse_numbers(plan)
        del config.quantization_config
    count, turn = WeightCount(plan.values, context.progress), threading.Lock()
    with BUILDING:
        chosen, known, shared = _chosen(table[type(config)], config, quantizer, plan)
    made: dict[str, Any] = {}
    for name, weight in plan.quantized.items():
        # A name that the model does not have is one that transformers changes; experts become one tensor.
        keeps = name in chosen or (bool(known) and name not in known and ".experts." not in name)
        made[name] = _Numbers(name, weight, context.dtype, count, turn, quantizer if keeps else None)
    # What a quantised checkpoint leaves as numbers, its maker has left so on purpose.
    plain = quantizer if plan.scheme is None else None
    for name, part in plan.plain.items():
        holds = name in chosen or name == shared
        made[name] = _Plain(part, count, turn, plain if holds else None, is_table=name == shared)
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
    if quantizer is not None:
        quantizer.finish(model, held_only=plan.scheme is not None)
    context.progress("weights", 1.0)
    return model.to(context.device).eval().requires_grad_(False)


def _chosen(
    factory: Any, config: Any, quantizer: Quantizer | None, plan: Plan
) -> tuple[frozenset[str], frozenset[str], str]:
    """The weights of a model to quantise, all of its weights, and the table that is the head too (`table_of`).

    None of them without a quantizer.
    """
    if quantizer is None:
        return frozenset(), frozenset(), ""
    with torch.device("meta"):
        model = factory(config)
    shared = quantizer.table_of(model, plan.plain) if plan.scheme is None else ""
    return quantizer.names(model), frozenset(model.state_dict()), shared


class _Plain:
    """A tensor that is stored as it is, read when indexed, and quantised where there is a quantizer."""

    def __init__(
        self,
        part: Part,
        count: WeightCount,
        turn: threading.Lock,
        quantizer: Quantizer | None,
        *,
        is_table: bool,
    ) -> None:
        """`is_table` is for the table of embeddings that is the head too."""
        self._part, self._count, self._turn = part, count, turn
        self._quantizer, self._is_table = quantizer, is_table

    def __getitem__(self, index: Any) -> torch.Tensor:
        quantizer, part = self._quantizer, self._part
        # NOTE: a weight of another shape than the model's is told by transformers.
        if quantizer is None or len(part.shape) != 2:
            return self._count.make(lambda: read(part))
        outer, inner = part.shape
        with self._turn:
            if self._is_table:
                # NOTE: the tensor is a view of the mapped file, and belongs to no name here.
                return self._count.make(lambda: quantizer.hold_table((outer, inner), map(read, (part,))))
            return self._count.make(lambda: quantizer.hold(part.name, read(part)))


class _Numbers:
    """A quantised weight, made when indexed. All weights of a model take turns by one lock.

    transformers makes weights in threads, of which each would hold a packed weight and its numbers in float32.
    """

    def __init__(
        self,
        name: str,
        weight: Weight,
        dtype: torch.dtype,
        count: WeightCount,
        turn: threading.Lock,
        quantizer: Quantizer | None,
    ) -> None:
        self._name, self._weight, self._dtype = name, weight, dtype
        self._count, self._turn, self._quantizer = count, turn, quantizer

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._turn:
            return self._count.make(self._made)

    def _made(self) -> torch.Tensor:
        quantizer = self._quantizer
        if quantizer is None:
            return dequantized(self._weight).to(self._dtype)
        kept = as_stored(self._weight, quantizer.kind_of(self._name))
        return quantizer.hold(self._name, dequantized(self._weight) if kept is None else kept)
