"""Tiny models in the layouts of GPTQ, AWQ and FP8: `write(root, layout)` gives the model that the files stand for.

The model is a Llama, or a mixture of experts, whose files name each expert apart.

Integers, zero points and scales are drawn. The numbers that they stand for are computed here one group or block at a
time, and words are packed one value at a time, as the documents of the formats say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from tests.tiny import chat_tokenizers

_SEED, _SPREAD, _GROUP, _BLOCK = 20261129, 0.02, 32, 128
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs stands."""


class Layout(NamedTuple):
    """How to store all linear layers of the transformer."""

    method: str
    bits: int = 4
    ordered: bool = False
    symmetric: bool = False
    version: int = 1
    group: int = _GROUP
    scale: str = "weight_scale_inv"
    """The name of the scale in FP8."""
    blocks: bool = True


LAYOUTS = {
    "gptq": Layout("gptq"),
    "gptq of 8 bits": Layout("gptq", 8),
    "gptq in order of activations": Layout("gptq", ordered=True),
    "gptq of 8 bits in order of activations, symmetric": Layout("gptq", 8, ordered=True, symmetric=True),
    "gptq, symmetric": Layout("gptq", symmetric=True),
    "gptq, version 2": Layout("gptq", version=2),
    "gptq, one group": Layout("gptq", group=-1),
    "awq": Layout("awq"),
    "awq, one group": Layout("awq", group=-1),
    "fp8 in blocks": Layout("fp8"),
    "fp8, weight_scale": Layout("fp8", scale="weight_scale", blocks=False),
    "fp8, weight_scale_inv": Layout("fp8", blocks=False),
}


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 32},
    ),
}
"""Configuration and model of a family, and what a mixture states."""
_EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3"), "w2"),
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj"), "down_proj"),
}
"""What files call experts, the two halves of their first product, and their second."""


def sizes(tokenizer: Any) -> dict[str, Any]:
    """Arguments of the configuration of a model of two layers, for the tokens of a tokenizer."""
    return {
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write(
    root: Path,
    layout: Layout,
    tensors: dict[str, torch.Tensor | None] | None = None,
    family: str = "llama",
) -> Any:
    """Write the model and its tokenizer, and return transformers' model of the numbers.

    `tensors` replaces tensors of the file, None leaves one out.
    """
    tokenizer = chat_tokenizers.build("chatml")
    configuration, factory, more = FAMILIES[family]
    config = configuration(**sizes(tokenizer), **more)
    torch.manual_seed(_SEED)
    model: Any = factory(config).eval().requires_grad_(False)
    draw, stored = np.random.default_rng(_SEED), dict[str, torch.Tensor]()
    for name, weight in model.named_parameters():
        if weight.ndim > 2:
            for base, part in _experts(family, name, weight):
                write_layer = {"gptq": _gptq, "awq": _awq, "fp8": _fp8}[layout.method]
                parts, numbers = write_layer(layout, draw, *part.shape)
                stored |= {f"{base}.{end}": each for end, each in parts.items()}
                part.copy_(torch.from_numpy(numbers))
            continue
        if "_proj." not in name:
            weight.normal_(0, 0.3 if weight.ndim > 1 else 1.0)
            apart = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if family == "mixtral" else name
            stored[apart] = weight.clone()
            continue
        base = name.removesuffix(".weight")
        write_layer = {"gptq": _gptq, "awq": _awq, "fp8": _fp8}[layout.method]
        parts, numbers = write_layer(layout, draw, *weight.shape)
        stored |= {f"{base}.{end}": part for end, part in parts.items()}
        weight.copy_(torch.from_numpy(numbers))
    for name, tensor in (tensors or {}).items():
        stored.pop(name, None)
        stored |= {} if tensor is None else {name: tensor}
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(root)
    save_file({name: part.contiguous() for name, part in stored.items()}, root / "model.safetensors")
    described = {
        **config.to_dict(),
        "architectures": [factory.__name__],
        "quantization_config": stated(layout),
    }
    (root / "config.json").write_text(json.dumps(described))
    return model


def _experts(family: str, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of all experts of a layer, each by the name that files give it without its end."""
    path, halves, second = _EXPERTS[family]
    layer = name.partition(".mlp.")[0]
    for number, expert in enumerate(weight):
        base = f"{layer}.{path}.{number}"
        if name.endswith("gate_up_proj"):
            yield from zip((f"{base}.{half}" for half in halves), expert.chunk(2), strict=True)
        else:
            yield f"{base}.{second}", expert


def stated(layout: Layout) -> dict[str, Any]:
    """The `quantization_config` of a layout."""
    if layout.method == "fp8":
        block = {"weight_block_size": [_BLOCK, _BLOCK]} if layout.blocks else {}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
    common = {"quant_method": layout.method, "bits": layout.bits, "group_size": layout.group}
    if layout.method == "awq":
        return {**common, "version": "gemm", "zero_point": True}
    form = {"checkpoint_format": "gptq_v2"} if layout.version == 2 else {}
    return {**common, "desc_act": layout.ordered, "sym": layout.symmetric, **form}


def _drawn(layout: Layout, draw: Any, outer: int, inner: int) -> tuple[Any, Any, Any]:
    """Integers [inner, outer], zero points and scales [groups, outer]."""
    groups, most = (1 if layout.group < 0 else inner // layout.group), 1 << layout.bits
    zeros = (
        np.full((groups, outer), most // 2) if layout.symmetric else draw.integers(1, most, (groups, outer))
    )
    scales = (draw.random((groups, outer)) * _SPREAD * 32 / most + 1e-4).astype(np.float16)
    return draw.integers(0, most, (inner, outer)), zeros, scales


def _numbers(values: Any, zeros: Any, scales: Any, groups: Any) -> Any:
    rows = [
        (values[at] - zeros[group]).astype(np.float32) * scales[group].astype(np.float32)
        for at, group in enumerate(groups)
    ]
    return np.stack(rows, axis=1)


def packed(values: Any, bits: int, places: tuple[int, ...] = ()) -> torch.Tensor:
    """Runs of a row [rows, n] as words [rows, n * bits / 32]."""
    each = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // each), dtype=np.uint32)
    for column in range(values.shape[1]):
        place = column % each
        shift = bits * (places[place] if places else place)
        words[:, column // each] |= values[:, column].astype(np.uint32) << np.uint32(shift)
    return torch.from_numpy(words.view(np.int32))


def _gptq(layout: Layout, draw: Any, outer: int, inner: int) -> tuple[dict[str, torch.Tensor], Any]:
    values, zeros, scales = _drawn(layout, draw, outer, inner)
    groups = np.arange(inner) // (inner if layout.group < 0 else layout.group)
    if layout.ordered:
        groups = draw.permutation(groups)
    parts = {
        "qweight": packed(values.T, layout.bits).T,
        "qzeros": packed(zeros - (layout.version == 1), layout.bits),
        "scales": torch.from_numpy(scales),
    }
    if layout.ordered or layout.version == 2:
        parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts, _numbers(values, zeros, scales, groups)


def _awq(layout: Layout, draw: Any, outer: int, inner: int) -> tuple[dict[str, torch.Tensor], Any]:
    values, zeros, scales = _drawn(layout, draw, outer, inner)
    groups = np.arange(inner) // (inner if layout.group < 0 else layout.group)
    parts = {
        "qweight": packed(values, 4, AWQ_PLACES),
        "qzeros": packed(zeros, 4, AWQ_PLACES),
        "scales": torch.from_numpy(scales),
    }
    return parts, _numbers(values, zeros, scales, groups)


def _fp8(layout: Layout, draw: Any, outer: int, inner: int) -> tuple[dict[str, torch.Tensor], Any]:
    drawn = draw.normal(0, 100, (outer, inner)).clip(-440, 440).astype(np.float32)
    weight = torch.from_numpy(drawn).to(torch.float8_e4m3fn)
    blocks = (-(-outer // _BLOCK), -(-inner // _BLOCK)) if layout.blocks else ()
    scale = (draw.random(blocks or 1) * 1e-3 + 1e-3).astype(np.float32)
    numbers = weight.float().numpy()
    for row in range(outer):
        for column in range(inner):
            numbers[row, column] *= scale[row // _BLOCK, column // _BLOCK] if blocks else scale[0]
    return {"weight": weight, layout.scale: torch.from_numpy(scale)}, numbers
