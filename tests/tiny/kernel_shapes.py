"""Tiny models whose layers have the form that kernels compute, with heads and rows of several sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.tiny.causal import FAMILIES

_ODD = {
    "hidden_size": 42,
    "intermediate_size": 76,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: FAMILIES[name] for name in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")},
    "odd": ("LlamaConfig", {**FAMILIES["llama"][1], **_ODD}),
    "odd_qwen3": ("Qwen3Config", {**FAMILIES["qwen3"][1], **_ODD}),
    "gemma": ("GemmaConfig", {**FAMILIES["llama"][1], "hidden_activation": "gelu_pytorch_tanh"}),
    "partial": (
        "Phi3Config",
        {
            **FAMILIES["phi3"][1],
            "hidden_size": 80,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.6,
            },
        },
    ),
    "one_key_head": ("LlamaConfig", {**FAMILIES["llama"][1], "num_key_value_heads": 1}),
    "own_key_heads": (
        "LlamaConfig",
        {**FAMILIES["llama"][1], "num_key_value_heads": 4, "attention_bias": True},
    ),
    "soft_cap": ("Gemma3TextConfig", {**FAMILIES["gemma3"][1], "final_logit_softcapping": 3.0}),
}
"""As `tests.tiny.causal.FAMILIES`."""


def make(shape: str, **changed: Any) -> Any:
    """A model with drawn weights, whose configuration may be `changed`."""
    kind, options = SHAPES[shape]
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**{**options, **changed})
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
