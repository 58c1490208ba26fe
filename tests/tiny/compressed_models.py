"""Tiny Llamas and mixtures of experts in the layouts of compressed-tensors, written by the package of that name.

`write(root, layout)` gives the model whose weights are what the package itself makes of its files. The package writes
no order of inputs any more, so `reorder` gives a layer the groups that earlier versions wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny import chat_tokenizers, quantized_models

_SEED = 20261129


class Layout(NamedTuple):
    """Arguments of `QuantizationArgs` for the weights, and the format on the disk."""

    form: str
    bits: int = 8
    kind: str = "int"
    symmetric: bool = True
    strategy: str = "channel"
    group: int | None = None
    block: list[int] | None = None
    dtype: torch.dtype = torch.float32


LAYOUTS = {
    "4 bits in groups": Layout("pack-quantized", 4, strategy="group", group=32),
    "4 bits in groups, asymmetric": Layout("pack-quantized", 4, symmetric=False, strategy="group", group=32),
    "4 bits by outputs": Layout("pack-quantized", 4),
    "4 bits by outputs, asymmetric": Layout("pack-quantized", 4, symmetric=False),
    "4 bits of one scale": Layout("pack-quantized", 4, strategy="tensor"),
    "8 bits packed in groups": Layout("pack-quantized", strategy="group", group=16, symmetric=False),
    "int8 by outputs": Layout("int-quantized"),
    "int8 by outputs, asymmetric": Layout("int-quantized", symmetric=False),
    "int8 of one scale": Layout("naive-quantized", strategy="tensor"),
    "int8 in groups": Layout("naive-quantized", strategy="group", group=32),
    "4 bits in bytes": Layout("naive-quantized", 4, symmetric=False, strategy="group", group=32),
    "float8 by outputs": Layout("float-quantized", kind="float"),
    "float8 of one scale": Layout("float-quantized", kind="float", strategy="tensor"),
    "float8 in blocks": Layout("float-quantized", kind="float", strategy="block", block=[96, 48]),
    "float8 by outputs, bfloat16": Layout("float-quantized", kind="float", dtype=torch.bfloat16),
    "4 bits in groups, bfloat16": Layout(
        "pack-quantized", 4, symmetric=False, strategy="group", group=32, dtype=torch.bfloat16
    ),
}


def llama() -> Any:
    """A Llama of two layers, for the tokens of `chatml`."""
    tokenizer = chat_tokenizers.build("chatml")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**quantized_models.sizes(tokenizer)))


def write(root: Path, *layouts: Layout) -> Any:
    """Write a model of drawn numbers and its tokenizer, and return transformers' model of the numbers of the files.

    With two layouts the second is that of `mlp.down_proj`.
    """
    torch.manual_seed(_SEED)
    model = llama().to(layouts[0].dtype).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(0, 0.3 if weight.ndim > 1 else 1.0)
    return save(root, model, chat_tokenizers.build("chatml"), *layouts)


def save(root: Path, model: Any, tokenizer: Any, *layouts: Layout) -> Any:
    """Write a model, which is changed, and its tokenizer as `write` does."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    for number, layout in enumerate(layouts):
        weights = QuantizationArgs(
            num_bits=layout.bits,
            type=layout.kind,
            symmetric=layout.symmetric,
            strategy=layout.strategy,
            group_size=layout.group,
            block_structure=layout.block,
        )
        targets = ["re:.*down_proj"] if number else ["Linear"]
        ignored = ["lm_head", *(["re:.*down_proj"] if layouts[1:] else [])]
        groups = {"group": QuantizationScheme(targets=targets, weights=weights, format=layout.form)}
        apply_quantization_config(
            model, QuantizationConfig(config_groups=groups, ignore=[] if number else ignored)
        )
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _measure(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(root)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    stored = {name: part.contiguous() for name, part in model.state_dict().items() if name not in tied}
    save_file(stored, root / "model.safetensors")
    described = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (root / "config.json").write_text(json.dumps(described))
    compressor.update_config(str(root))
    compressor.decompress_model(model)
    wanted = type(model)(model.config)
    wanted.load_state_dict({name: part for name, part in model.state_dict().items() if "weight_" not in name})
    return wanted.to(layouts[0].dtype).eval().requires_grad_(False)


def _measure(module: Any) -> None:
    """Give a layer the scales that the package computes from the least and the largest of its numbers."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args, weight = module.quantization_scheme.weights, module.weight
    outer, inner = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "group":
        parts = weight.reshape(outer, -1, args.group_size)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -inner % columns, 0, -outer % rows))
        parts = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        parts = weight.reshape(outer, 1, -1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))


def change(root: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the file, None leaves one out."""
    stored = load_file(root / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name, None)
        stored |= {} if tensor is None else {name: tensor}
    save_file(stored, root / "model.safetensors")


def reorder(root: Path, base: str, order: torch.Tensor) -> torch.Tensor:
    """Give a layer of 4 bits in symmetric groups the groups `order` [inner] of its inputs; returns its numbers."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    stored = load_file(root / "model.safetensors")
    words, scales = stored[f"{base}.weight_packed"], stored[f"{base}.weight_scale"]
    change(root, {f"{base}.weight_g_idx": order.int()})
    values = unpack_from_int32(words, 4, torch.Size(stored[f"{base}.weight_shape"].tolist()))
    columns = [values[:, at].float() * scales[:, group] for at, group in enumerate(order.tolist())]
    return torch.stack(columns, 1)
