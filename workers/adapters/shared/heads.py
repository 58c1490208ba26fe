"""The layers after a transformer in the sentence-transformers layout: Dense, LayerNorm, Normalize.

They run in fp32 whatever the transformer runs in.  Keys and defaults follow sentence-transformers 6.2
(`dense.py`, `layer_norm.py`, `normalize.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


class Normalize(nn.Module):
    """Scale vectors [..., width] to length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The scaled vectors; a zero vector stays zero."""
        return F.normalize(vectors, p=2, dim=-1)


class Dense(nn.Module):
    """A linear layer with an activation and an optional residual connection."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build from the module's config.json."""
        super().__init__()
        inner, outer = int(config["in_features"]), int(config["out_features"])
        self.linear = nn.Linear(inner, outer, bias=bool(config.get("bias", True)))
        self.activation = stored_activation(
            str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        )
        self._residual = bool(config.get("use_residual", False))
        if self._residual and inner != outer:
            self.residual = nn.Linear(inner, outer, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: torch.Tensor = self.activation(self.linear(vectors))
        if not self._residual:
            return out
        return out + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class LayerNorm(nn.Module):
    """Layer normalisation of vectors [..., dimension]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build from the module's config.json."""
        super().__init__()
        self.norm = nn.LayerNorm(int(config["dimension"]))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """The normalised vectors."""
        normed: torch.Tensor = self.norm(vectors)
        return normed


HEADS: dict[str, type[Dense | LayerNorm]] = {"Dense": Dense, "LayerNorm": LayerNorm}


def load_head(kind: str, directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """A Dense, LayerNorm or Normalize with its weights from `directory`, in fp32 on CPU.

    Raises FileNotFoundError without model.safetensors and RuntimeError where the weights do not fit the config.
    """
    if kind == "Normalize":
        return Normalize()
    head = HEADS[kind](config)
    weights = directory / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"module {directory.name} has no model.safetensors")
    head.load_state_dict(load_file(str(weights)))
    return head.float()


def stored_activation(name: str) -> nn.Module:
    """The torch.nn activation stored under its dotted name; raises ValueError for anything else."""
    found = getattr(nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"unsupported activation {name!r}: only modules of torch.nn are loaded")
    made: nn.Module = found()
    return made
