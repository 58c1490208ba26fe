"""LoRA adapters in PEFT's layout for tiny models, and the same models with an adapter merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ATTENTION = ("attention.self.query", "attention.self.value")


def write(
    directory: Path,
    model: Path,
    targets: tuple[str, ...] = ATTENTION,
    *,
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """An adapter for all layers of `model` whose path ends with one of `targets`; `ranks` are those of single targets.

    Weights are drawn with a wide spread, so that the adapter changes every vector. `config` goes into its config.
    """
    shapes = {path: tuple(weight.shape) for path, weight in layers_of(model, targets).items()}
    assert shapes, f"no layer of {model.name} ends with {targets}"
    return write_layers(directory, shapes, targets, seed=seed, ranks=ranks, **config)


def write_layers(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    targets: tuple[str, ...],
    *,
    seed: int = 1,
    ranks: Mapping[str, int] | None = None,
    spread: float = 0.1,
    **config: Any,
) -> Path:
    """An adapter for layers with weights of these shapes [outputs, inputs], by path."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = int(config.setdefault("r", 4))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (outputs, inputs) in shapes.items():
        own = next((r for target, r in (ranks or {}).items() if path.endswith(target)), rank)
        down = torch.randn((own, inputs), generator=generator)
        up = torch.randn((outputs, own), generator=generator)
        tensors[f"base_model.model.{path}.lora_A.weight"] = down * spread
        tensors[f"base_model.model.{path}.lora_B.weight"] = up * spread
    save_file(tensors, directory / WEIGHTS)
    stored = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "target_modules": list(targets),
        **config,
    }
    (directory / CONFIG).write_text(json.dumps(stored))
    return directory


def layers_of(model: Path, targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Weights of the layers of a model directory whose path ends with one of `targets`, by path."""
    weights = load_file(model / "model.safetensors")
    paths = {name.removesuffix(".weight"): tensor for name, tensor in weights.items() if tensor.dim() == 2}
    return {path: tensor for path, tensor in paths.items() if path.endswith(targets)}


def merged(model: Path, lora: Path, directory: Path, scale: float | Mapping[str, float]) -> Path:
    """A copy of a model whose weights are W + scale * B A; `scale` may differ by the end of the layer's path."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    tensors = load_file(lora / WEIGHTS)
    for name in [name for name in tensors if "lora_A" in name]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        found = (
            scale if isinstance(scale, float) else next(s for end, s in scale.items() if path.endswith(end))
        )
        product = tensors[name.replace("lora_A", "lora_B")].double() @ tensors[name].double()
        weights[f"{path}.weight"] = (weights[f"{path}.weight"].double() + found * product).float()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
