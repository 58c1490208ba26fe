"""The layers of a decoder like Llama's on a CPU, computed without transformers' modules.

A step of few rows is many short operations, and transformers' modules take more calls for norms, rotary positions and
arguments than the arithmetic needs. `Decoder` computes what they compute, with their weights, in fewer calls:

1. a norm divides by the length of the row, one call in place of five;
2. queries and keys are turned together;
3. queries, keys and values are one product, and gate and up another, where `joined` made them so;
4. products (`joined.bare`) and attention are called directly. What they need of a layer is looked up at load.

A decoder is used where the classes of the model are known and the proof at load (`workers.generation.proof`) finds the
logits of the model in its steps. Steps with pictures, LoRA adapters and positions that depend on the length of a text
run through transformers' modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.generation.heads import Heads
from workers.generation.joined import Part, Product, bare

KNOWN = frozenset(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))
"""Models of transformers whose layers are norm, attention, norm and gated linear units, with residual sums."""

Attend = Callable[[int, Heads, Tensor, Tensor, Tensor], Tensor]
"""`PagedAttention.attended`."""


class _Norm(NamedTuple):
    """Root mean square norm over the last `width` numbers: `weight` and `least` have the root of `width` in them."""

    weight: Tensor
    least: Tensor

    @classmethod
    def of(cls, module: Any) -> _Norm:
        root = math.sqrt(module.weight.numel())
        return cls(module.weight.detach() * root, torch.tensor(root * math.sqrt(module.variance_epsilon)))

    def __call__(self, rows: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        return (rows * self.weight).div_(torch.hypot(length, self.least))


class _Layer(NamedTuple):
    """One layer: what it multiplies by, its norms, and facts of its attention.

    `projections` give the numbers of queries, keys and values side by side, `gates` those of gate and up. `keys` is the
    number of heads of keys, which is that of values.
    """

    number: int
    heads: Heads
    dim: int
    keys: int
    projections: Sequence[Product]
    output: Product
    gates: Sequence[Product]
    down: Product
    before_attention: _Norm
    before_unit: _Norm
    of_queries: _Norm | None
    of_keys: _Norm | None


class Decoder:
    """The layers of one model, whose weights stay those of the model."""

    def __init__(self, model: Any) -> None:
        """`model` is one that `knows` knows. Its linear layers must not be replaced afterwards."""
        self._body, self._head = model.model, bare(model.lm_head)
        self._layers = [self._layer(layer) for layer in model.model.layers]
        self._last = _Norm.of(model.model.norm)

    @staticmethod
    def knows(model: Any) -> bool:
        """Whether a decoder computes what the model computes, by the model's classes, device and precision."""
        kind = type(model)
        known = kind.__name__ in KNOWN and kind.__module__.startswith("transformers.models.")
        if not known or model.device.type != "cpu" or model.dtype != torch.float32:
            return False
        return bool(getattr(model.config, "hidden_act", "") == "silu")

    @staticmethod
    def _layer(layer: Any) -> _Layer:
        attention, unit = layer.self_attn, layer.mlp
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        of_queries, of_keys = (None if norm is None else _Norm.of(norm) for norm in norms)
        # NOTE: Mistral's layers read the window from the configuration, the others keep their own.
        window = getattr(attention, "sliding_window", None)
        if type(attention).__name__ == "MistralAttention":
            window = getattr(attention.config, "sliding_window", None)
        return _Layer(
            attention.layer_idx,
            Heads(attention.scaling, None, None, int(window or 0), None),
            attention.head_dim,
            attention.k_proj.out_features // attention.head_dim,
            _products(attention.q_proj, attention.k_proj, attention.v_proj),
            bare(attention.o_proj),
            _products(unit.gate_proj, unit.up_proj),
            bare(unit.down_proj),
            _Norm.of(layer.input_layernorm),
            _Norm.of(layer.post_attention_layernorm),
            of_queries,
            of_keys,
        )

    def logits(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int) -> Tensor:
        """Logits [rows, vocabulary] of the rows `keep` (0: all) of tokens and positions int64 [tokens]."""
        hidden = self._body.embed_tokens(ids)
        cosines, sines = self._body.rotary_emb(hidden, positions[None])
        cosines, sines = cosines[0][:, None], sines[0][:, None]
        half = sines.shape[-1] // 2
        turn = (cosines, torch.cat((-sines[..., :half], sines[..., half:]), dim=-1))
        for layer in self._layers:
            q, k, v = self._heads(layer, layer.before_attention(hidden), turn)
            found = attend(layer.number, layer.heads, q, k, v)
            hidden = hidden + layer.output(found.reshape(len(found), -1))
            hidden += self._gated(layer, layer.before_unit(hidden))
        kept = hidden if isinstance(keep, int) else hidden[keep]
        return self._head(self._last(kept)).float()

    @staticmethod
    def _heads(layer: _Layer, rows: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [tokens, width] to queries, keys and values [tokens, heads, dim], the first two turned."""
        heads = _side_by_side(layer.projections, rows).view(len(rows), -1, layer.dim)
        both, v = heads[:, : -layer.keys], heads[:, -layer.keys :]
        if layer.of_queries is None or layer.of_keys is None:
            both = _turned(both, turn)
            return both[:, : -layer.keys], both[:, -layer.keys :], v
        q, k = layer.of_queries(both[:, : -layer.keys]), layer.of_keys(both[:, -layer.keys :])
        return _turned(q, turn), _turned(k, turn), v

    @staticmethod
    def _gated(layer: _Layer, rows: Tensor) -> Tensor:
        """The gated linear unit: [tokens, width] to [tokens, width]."""
        gate, up = _side_by_side(layer.gates, rows).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up))


def _products(*layers: Any) -> list[Product]:
    """The products of layers that read the same rows: a single one where they are joined."""
    first = layers[0]
    return [bare(first.product.whole)] if isinstance(first, Part) else [bare(layer) for layer in layers]


def _side_by_side(products: Sequence[Product], rows: Tensor) -> Tensor:
    """The results of several products beside one another, float32 [n, all outputs]."""
    results = [product(rows) for product in products]
    return (results[0] if len(results) == 1 else torch.cat(results, -1)).float()


def _turned(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: heads [tokens, heads, dim] by cosines and signed sines [tokens, 1, dim]."""
    cosines, sines = turn
    return torch.addcmul(heads * cosines, heads.roll(heads.shape[-1] // 2, -1), sines)
