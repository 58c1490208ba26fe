"""Quantises the linear layers of a model that generates text, while the model is built.

1. `names` are the weights to quantise: those of plain linear layers of the part that reads text. A head of its own has
   int8 at least. Narrow layers stay, as those that choose experts.
2. Whoever reads weights one by one hands each of them to `hold`, which makes the layer at once and returns a tensor of
   the right shape without data. So a load never has more than one weight of a layer as numbers.
3. `finish` puts the layers in their places. What was not read one by one (code that a model brings, weights that
   transformers renames or joins) is quantised there.
4. On a CPU with products of integers fp8 is int8: float8 has no product there, and its numbers cost each call more.
5. A head that shares the table of embeddings becomes int8 on such a CPU, and so does the table.
   Elsewhere both stay, as a second form of the table would take more memory than the quantised head saves. Whoever
   reads weights one by one hands the table to `hold_table` in runs of rows, so that its numbers never lie there whole.

`merged` makes one layer of several that read the same rows, for `workers.generation.joined`.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workers.adapters.shared.building import precision_of
from workers.adapters.shared.proven_linears import layer_of, proof_rows
from workers.adapters.shared.quantized_linears import (
    FP8,
    INT4,
    INT8,
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    QuantizedWeight,
    quantize,
    quantize_runs,
)

log = logging.getLogger(__name__)

LEAST_WIDTH = 32
"""Layers with fewer inputs or outputs stay as they are."""


class QuantizedTable(nn.Module):
    """A table of embeddings in int8 with one scale a row. `weight` has shape and type of the numbers, and no data."""

    values: Tensor
    scales: Tensor

    def __init__(self, stored: QuantizedWeight, dtype: torch.dtype) -> None:
        """`stored` has one scale for each output, which is a row here; rows are given in `dtype`."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = stored.shape
        self._dtype = dtype
        self.weight = torch.empty(stored.shape, dtype=dtype, device="meta")
        self.register_buffer("values", stored.values, persistent=False)
        self.register_buffer("scales", stored.scales.to(dtype), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids int64 [...] to their rows [..., embedding_dim]."""
        return self.values[ids].to(self._dtype).mul_(self.scales[ids])


class Quantizer:
    """The quantised layers of one load; `kind` is int8, int4 or fp8."""

    def __init__(self, kind: str, dtype: torch.dtype, device: torch.device) -> None:
        """Rows have `dtype`; the layers are kept on `device`."""
        self.kind, self._dtype, self._device = kind, dtype, device
        self._made = INT8 if kind == FP8 and self._has_integers() else kind
        self._held: dict[int, tuple[str, Tensor, QuantizedLinear]] = {}
        self._told: Counter[tuple[str, str]] = Counter()
        self._table: tuple[Tensor, QuantizedWeight, QuantizedLinear] | None = None

    @staticmethod
    def names(model: Any) -> frozenset[str]:
        """The weights of `model` to quantise."""
        return frozenset(f"{name}.weight" for name, *_ in _chosen(model))

    def table_of(self, model: Any, stored: Container[str]) -> str:
        """The name of the table of embeddings to hand to `hold_table`; empty without one.

        `stored` are the names of weights that the files hold. A head that is stored too may differ from the table.
        """
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        if len(tied) != 1:
            return ""
        ((head, table),) = tied.items()
        modules = dict(model.named_modules())
        is_read = table in stored and head not in stored
        is_both = (
            modules.get(head.removesuffix(".weight")) is model.get_output_embeddings()
            and modules.get(table.removesuffix(".weight")) is model.get_input_embeddings()
        )
        return table if is_read and is_both and self._shares(model) else ""

    def kind_of(self, name: str) -> str:
        """The kind of a weight."""
        return INT8 if self._made == INT4 and name.endswith("lm_head.weight") else self._made

    def hold(self, name: str, weight: QuantizedWeight | Tensor) -> Tensor:
        """Keep a weight [outer, inner] as a layer; a stand-in of its shape. Raises `LayerNotProven`."""
        stored = quantize(weight, self.kind_of(name)) if isinstance(weight, Tensor) else weight
        layer = self._layer(name.removesuffix(".weight"), stored, None)
        place = torch.zeros(1, dtype=self._dtype)
        self._held[place.data_ptr()] = (name, place, layer)
        return place.expand(stored.shape)

    def hold_table(self, shape: tuple[int, int], runs: Iterable[Tensor]) -> Tensor:
        """Keep the table that `table_of` names as int8, out of runs of its rows [any, width]; a stand-in of its shape.

        Raises `LayerNotProven`.
        """
        stored = quantize_runs(runs, shape, INT8)
        layer = self._layer("lm_head", stored, None)
        place = torch.zeros(1, dtype=self._dtype)
        self._table = place, stored, layer
        return place.expand(stored.shape)

    @torch.no_grad()
    def finish(self, model: Any, *, held_only: bool = False) -> None:
        """Put the layers into `model`, and unless `held_only` quantise those that nobody has held.

        Raises `LayerNotProven`, and ValueError for a held weight that is not the weight of a linear layer.
        """
        self._share(model, held_only=held_only)
        held = dict(self._held)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                found = held.pop(child.weight.data_ptr(), None) if type(child) is nn.Linear else None
                if found is not None:
                    layer = found[2]
                    bias = None if child.bias is None else child.bias.to(self._device)
                    layer.register_buffer("bias", bias, persistent=False)
                    setattr(parent, name, layer)
        if held:
            lost, *_ = next(iter(held.values()))
            raise ValueError(
                f"precision: {self.kind}: {lost} is not the weight of one linear layer of {type(model).__name__}; "
                "without `precision` the weights become numbers"
            )
        self._held.clear()
        for name, parent, end, child in [] if held_only else list(_chosen(model)):
            stored = quantize(child.weight, self.kind_of(f"{name}.weight"))
            setattr(parent, end, self._layer(name, stored, child.bias))
        self._tell(model)

    def _share(self, model: Any, *, held_only: bool) -> None:
        """Make int8 of a table of embeddings that is the head too. Raises `LayerNotProven`.

        PERF: a head reads its table for each step. 49,152 rows of 576 take 3.2 / 3.9 / 8.3 ms of one thread for 1 / 8 /
        32 rows in int8 and 7.8 / 35 / 30 ms in float32. Both forms of int8, that of the table and that of the product,
        have half the bytes of float32.
        """
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if self._table is None:
            if held_only or not self._shares(model) or head.weight is not table.weight:
                return
            stored = quantize(table.weight, INT8)
            # The numbers go before the layer is made.
            head.weight = table.weight = nn.Parameter(table.weight.new_empty(0), requires_grad=False)
            layer = self._layer("lm_head", stored, None)
        else:
            place, stored, layer = self._table
            if any(weight.data_ptr() != place.data_ptr() for weight in (head.weight, table.weight)):
                raise ValueError(
                    f"precision: {self.kind}: the table of embeddings of {type(model).__name__} is not the head"
                )
            self._table = None
        bias = None if head.bias is None else head.bias.to(self._device, self._dtype)
        layer.register_buffer("bias", bias, persistent=False)
        model.set_output_embeddings(layer)
        model.set_input_embeddings(QuantizedTable(stored, self._dtype))

    def _shares(self, model: Any) -> bool:
        """Whether a table of `model` becomes int8 where the table is the head too: by kind, device, modules, sizes."""
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if self._made == FP8 or self._device.type != "cpu":
            return False
        if type(head) is not nn.Linear or type(table) is not nn.Embedding or table.max_norm is not None:
            return False
        return min(head.weight.shape) >= LEAST_WIDTH and self._has_integers()

    def _has_integers(self) -> bool:
        """Whether the device is a processor with products of int8."""
        if self._device.type != "cpu":
            return False
        tried = quantize(torch.eye(LEAST_WIDTH), INT8)
        return isinstance(layer_of("products of int8", tried, None, self._dtype, self._device), Int8Linear)

    def _layer(self, name: str, stored: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        """A proven layer, counted for the log. Raises `LayerNotProven`."""
        layer = layer_of(name, stored, bias, self._dtype, self._device)
        self._told[stored.words, layer.words] += 1
        return layer

    def _tell(self, model: Any) -> None:
        layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        if not layers:
            raise ValueError(
                f"precision: {self.kind}: {type(model).__name__} has no linear layers that can be quantised"
            )
        model.rounding = max(layer.rounding for layer in layers)
        held = sum(quantized_bytes(layer) for layer in layers)
        rest = sum(weight.nbytes for weight in model.parameters())
        log.info(
            "%s: %d linear layers stay quantised (%s) in %d bytes; other weights (embeddings, norms, experts) have %d",
            type(model).__name__,
            len(layers),
            precision_of(model),
            held,
            rest,
        )
        named = model.named_parameters()
        experts = sum(weight.nbytes for name, weight in named if ".experts." in name and weight.dim() > 1)
        if experts:
            # NOTE: transformers keeps the experts of a layer as one tensor, which is no linear layer.
            log.warning(
                "%s: precision %s leaves the experts as %s: %d of %d bytes of weights",
                type(model).__name__,
                self.kind,
                str(self._dtype).removeprefix("torch."),
                experts,
                held + rest,
            )
        for (stored, product), count in sorted(self._told.items()):
            log.info(
                "precision %s on %s: %d weights of %s are multiplied as %s",
                self.kind,
                self._device.type,
                count,
                stored,
                product,
            )
        self._told.clear()


@torch.inference_mode()
def merged(layers: Sequence[nn.Module]) -> QuantizedLinear | None:
    """One layer that gives the outputs of several on a CPU, bit for bit, side by side; None where no such layer is."""
    first = layers[0]
    if not isinstance(first, Int8Linear | Int4Linear) or first.device.type != "cpu":
        return None
    parts = [layer for layer in layers if type(layer) is type(first) and layer.form == first.form]
    if len(parts) < len(layers) or any(layer.order is not None for layer in parts):
        return None
    whole: QuantizedLinear = copy.copy(first)
    # NOTE: a copy of a module shares the table of its buffers.
    whole._buffers = dict(first._buffers)
    states = proof_rows(first.in_features, first.dtype, first.device)
    try:
        whole.take(parts[1:])
    # NOTE: torch says so that a processor's layout cannot be read back.
    except RuntimeError as error:
        log.info("layers of %s stay apart: %s", first.kind, str(error).partition("\n")[0])
        return None
    for rows in (states, states[-1:]):
        if not torch.equal(whole(rows), torch.cat([part(rows) for part in parts], -1)):
            log.info("layers of %s stay apart: their joined product has other results", first.kind)
            return None
    return whole


def quantized_bytes(layer: QuantizedLinear) -> int:
    """Bytes of a layer."""
    return layer.packed_nbytes + sum(buffer.nbytes for buffer in layer.buffers())


def _chosen(model: Any) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """Linear layers to quantise: path, parent, name in the parent, layer."""
    body = getattr(model, model.base_model_prefix, model)
    text = getattr(body, "language_model", None) or body
    inside = {id(module) for module in text.modules()}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    configs = (model.config, model.config.get_text_config())
    tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    if head is not None and not tied and head.weight is not table.weight:
        inside.add(id(head))
    for path, parent in model.named_modules():
        for end, child in parent.named_children():
            if type(child) is not nn.Linear or id(child) not in inside or (tied and child is head):
                continue
            if min(child.in_features, child.out_features) >= LEAST_WIDTH:
                yield f"{path}.{end}" if path else end, parent, end, child
