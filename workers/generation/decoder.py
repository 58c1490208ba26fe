"""The layers of a decoder like Llama's on a CPU, computed without transformers' modules.

A step of few rows is many short operations, and transformers' modules take more calls for norms, rotary positions and
arguments than the arithmetic needs. `Decoder` computes what they compute, with their weights, in fewer calls:

1. a norm divides by the length of the row, one call in place of five;
2. queries and keys are turned together;
3. queries, keys and values are one product, and gate and up another, where `joined` made them so;
4. the attention function is called directly.

A decoder is used where the classes of the model are known and the proof at load (`workers.generation.proof`) finds the
logits of the model in its steps. Steps with pictures, LoRA adapters and positions that depend on the length of a text
run through transformers' modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.generation.joined import Part

KNOWN = frozenset(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"))
"""Models of transformers whose layers are norm, attention, norm and gated linear units, with residual sums."""

Attend = Callable[..., tuple[Tensor, None]]
"""`PagedAttention.attend`."""


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
    """One layer: its modules of transformers, and the norms before attention and gated unit, of queries and of keys."""

    attention: Any
    unit: Any
    before_attention: _Norm
    before_unit: _Norm
    of_queries: _Norm | None
    of_keys: _Norm | None
    window: int | None


class Decoder:
    """The layers of one model, whose weights stay those of the model."""

    def __init__(self, model: Any) -> None:
        """`model` is one that `knows` knows."""
        self._body, self._head = model.model, model.lm_head
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
        attention = layer.self_attn
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        of_queries, of_keys = (None if norm is None else _Norm.of(norm) for norm in norms)
        before, behind = _Norm.of(layer.input_layernorm), _Norm.of(layer.post_attention_layernorm)
        # NOTE: Mistral's layers read the window from the configuration, the others keep their own.
        window = getattr(attention, "sliding_window", None)
        if type(attention).__name__ == "MistralAttention":
            window = getattr(attention.config, "sliding_window", None)
        return _Layer(attention, layer.mlp, before, behind, of_queries, of_keys, window)

    def logits(self, ids: Tensor, positions: Tensor, attend: Attend, keep: Tensor | int) -> Tensor:
        """Logits [rows, vocabulary] of the rows `keep` (0: all) of tokens and positions int64 [tokens]."""
        hidden = self._body.embed_tokens(ids)
        cosines, sines = self._body.rotary_emb(hidden, positions[None])
        cosines, sines = cosines[0][:, None], sines[0][:, None]
        half = sines.shape[-1] // 2
        turn = (cosines, torch.cat((-sines[..., :half], sines[..., half:]), dim=-1))
        for layer in self._layers:
            found = self._attended(layer, layer.before_attention(hidden), turn, attend)
            hidden = hidden + layer.attention.o_proj(found)
            hidden += self._gated(layer.unit, layer.before_unit(hidden))
        kept = hidden if isinstance(keep, int) else hidden[keep]
        logits: Tensor = self._head(self._last(kept))
        return logits

    @staticmethod
    def _attended(layer: _Layer, rows: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[tokens, width] to what the heads of a layer found, [tokens, heads * value width]."""
        module, tokens = layer.attention, len(rows)
        dim: int = module.head_dim
        keys: int = module.k_proj.out_features // dim
        if isinstance(module.q_proj, Part) and layer.of_queries is None:
            joined = module.q_proj.product(rows).view(tokens, -1, dim)
            turned, v = _turned(joined[:, :-keys], turn), joined[:, -keys:]
            q, k = turned[:, :-keys], turned[:, -keys:]
        else:
            q, k = (each(rows).view(tokens, -1, dim) for each in (module.q_proj, module.k_proj))
            v = module.v_proj(rows).view(tokens, -1, dim)
            if layer.of_queries is not None and layer.of_keys is not None:
                q, k = layer.of_queries(q), layer.of_keys(k)
            q, k = _turned(q, turn), _turned(k, turn)
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        found, _ = attend(module, q, k, v, None, scaling=module.scaling, sliding_window=layer.window)
        return found.reshape(tokens, -1)

    @staticmethod
    def _gated(unit: Any, rows: Tensor) -> Tensor:
        """The gated linear unit: [tokens, width] to [tokens, width]."""
        if isinstance(unit.gate_proj, Part):
            gate, up = unit.gate_proj.product(rows).chunk(2, dim=-1)
        else:
            gate, up = unit.gate_proj(rows), unit.up_proj(rows)
        result: Tensor = unit.down_proj(F.silu(gate).mul_(up))
        return result


def _turned(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: heads [tokens, heads, dim] by cosines and signed sines [tokens, 1, dim]."""
    cosines, sines = turn
    return torch.addcmul(heads * cosines, heads.roll(heads.shape[-1] // 2, -1), sines)
