"""BERT without padding: all sequences of a batch lie in one row, and only attention knows where each one ends.

The linear steps run through torch's own `linear`, or through oneDNN with weights laid out for it beforehand. For
float32 torch picks MKL, which leaves half of some processors' vector width unused; oneDNN does not. On CUDA in half
precision one flash attention call serves the whole row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The steps of one encoder layer; query, key and value are fused into one linear step."""

    qkv: Step
    attention_output: Step
    attention_norm: Step
    intermediate: Step
    output: Step
    output_norm: Step


def _plain(weight: Tensor, bias: Tensor) -> Step:
    return lambda rows: F.linear(rows, weight, bias)


def _onednn(weight: Tensor, bias: Tensor) -> Step:
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    run = torch.ops.mkldnn._linear_pointwise
    return lambda rows: run(rows, laid_out, bias, "none", [], "")


def _layer(layer: Any, linear: Callable[[Tensor, Tensor], Step]) -> _Layer:
    attention = layer.attention.self
    parts = (attention.query, attention.key, attention.value)
    weight = torch.cat([part.weight for part in parts]).detach()
    bias = torch.cat([part.bias for part in parts]).detach()
    dense = (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense)
    attended, intermediate, output = (linear(step.weight.detach(), step.bias.detach()) for step in dense)
    return _Layer(
        linear(weight, bias),
        attended,
        layer.attention.output.LayerNorm,
        intermediate,
        output,
        layer.output.LayerNorm,
    )


class PackedBert:
    """Mean-pooled, normalised embeddings of a Hugging Face BERT with exact GELU, in the precision of its weights."""

    def __init__(self, model: Any, *, onednn: bool = False) -> None:
        self._embeddings = model.embeddings
        self._heads = int(model.config.num_attention_heads)
        self._flash = model.device.type == "cuda" and model.dtype != torch.float32
        self._layers = [_layer(layer, _onednn if onednn else _plain) for layer in model.encoder.layer]

    def __call__(self, batch: list[list[int]]) -> Tensor:
        """float32 [sequences, hidden] for a batch of token id lists; fastest when equal lengths are neighbours."""
        lengths = [len(ids) for ids in batch]
        hidden = self._embed(batch, lengths)
        attend = (
            self._flash_attention(lengths, hidden.device) if self._flash else self._run_attention(lengths)
        )
        for layer in self._layers:
            attended = attend(layer.qkv(hidden))
            hidden = layer.attention_norm(layer.attention_output(attended) + hidden)
            hidden = layer.output_norm(layer.output(F.gelu(layer.intermediate(hidden))) + hidden)
        pooled = torch.segment_reduce(
            hidden.float(), "mean", lengths=torch.tensor(lengths, device=hidden.device)
        )
        return F.normalize(pooled, dim=1)

    def _embed(self, batch: list[list[int]], lengths: list[int]) -> Tensor:
        """Sum of word, position and token type embeddings, [tokens, hidden]."""
        table = self._embeddings
        device = table.word_embeddings.weight.device
        ids = torch.tensor(list(itertools.chain.from_iterable(batch)), device=device)
        positions = torch.tensor(list(itertools.chain.from_iterable(map(range, lengths))), device=device)
        total = table.word_embeddings(ids) + table.position_embeddings(positions)
        normed: Tensor = table.LayerNorm(total + table.token_type_embeddings.weight[0])
        return normed

    def _run_attention(self, lengths: list[int]) -> Step:
        """Attention within each sequence, [tokens, 3 * hidden] to [tokens, hidden]; equal lengths share a call."""
        runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]

        def attend(qkv: Tensor) -> Tensor:
            width = qkv.shape[1] // 3
            result = qkv.new_empty(qkv.shape[0], width)
            start = 0
            for length, count in runs:
                end = start + count * length
                shape = (count, length, 3, self._heads, width // self._heads)
                query, key, value = qkv[start:end].view(shape).permute(2, 0, 3, 1, 4)
                attended = F.scaled_dot_product_attention(query, key, value)
                result[start:end].view(count, length, self._heads, -1).copy_(attended.transpose(1, 2))
                start = end
            return result

        return attend

    def _flash_attention(self, lengths: list[int], device: torch.device) -> Step:
        """The same in one call with the ends of the sequences as an argument; CUDA and half precision only."""
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        longest = max(lengths)

        def attend(qkv: Tensor) -> Tensor:
            query, key, value = qkv.view(qkv.shape[0], 3, self._heads, -1).unbind(1)
            attended = varlen_attn(query, key, value, ends, ends, longest, longest)
            assert isinstance(attended, Tensor)
            return attended.flatten(1)

        return attend
