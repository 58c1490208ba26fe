"""Tiny models that generate, one for each form of attention: `build("gemma2")` has seeded weights and no tokenizer.

Windows and chunks are shorter than the prompts of the tests, so that a mask that a layer forgets changes tokens.
Weights are drawn wide, for the same reason.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

VOCABULARY = 320
CONTEXT = 512
WINDOW = 24
"""Tokens that a sliding layer sees, and tokens of a chunk."""
_SPREAD = 1.2
_SEED = 20240607
_TURNS = ["sliding_attention", "full_attention"]
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 4,
}
_HEADS = {**_BASE, "head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = {**_HEADS, "sliding_window": WINDOW}
_UNTIED = {"tie_word_embeddings": False}
"""Gemma scales its embeddings up. With a head of the same weights it would repeat the last token for ever."""
_SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SHARED_LAYERS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 1,
    "layer_types": _TURNS * 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _HEADS),
    "llama4": (
        "Llama4TextConfig",
        {**_HEADS, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_local_experts": 2},
    ),
    "qwen2": ("Qwen2Config", _BASE),
    "qwen3": ("Qwen3Config", _HEADS),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEADS, **_EXPERTS, "num_experts": 4}),
    "mistral": ("MistralConfig", _SLIDING),
    "gemma2": ("Gemma2Config", {**_SLIDING, **_UNTIED, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", {**_SLIDING, **_UNTIED, "layer_types": _TURNS}),
    "gemma3n": ("Gemma3nTextConfig", {**_SLIDING, **_UNTIED, **_SHARED_LAYERS}),
    "phi3": ("Phi3Config", {**_BASE, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", _BASE),
    "granite": ("GraniteConfig", {**_BASE, "attention_multiplier": 0.2}),
    "deepseek_v3": ("DeepseekV3Config", {**_BASE, **_EXPERTS, **_LATENT}),
    "gpt_oss": ("GptOssConfig", {**_SLIDING, **_SINKS}),
}
"""The configuration of each model: its class in transformers, and what differs from the defaults."""
BORDER = 32
"""Tokens of a text beyond which the rotary positions of `BY_LENGTH` change."""
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": BORDER,
}
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]}
_WIDE_FACTORS = {name: [*values, *values[-2:]] for name, values in _FACTORS.items()}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3_long": (
        "Phi3Config",
        {**_BASE, "rope_parameters": {**_LONG, **_FACTORS}, "original_max_position_embeddings": BORDER},
    ),
    "llama_long": ("LlamaConfig", {**_HEADS, "rope_parameters": {**_LONG, **_WIDE_FACTORS}}),
    "llama_dynamic": (
        "LlamaConfig",
        {**_HEADS, "rope_parameters": _DYNAMIC, "max_position_embeddings": BORDER},
    ),
    "phimoe_long": (
        "PhimoeConfig",
        {
            **_BASE,
            "num_local_experts": 4,
            "original_max_position_embeddings": BORDER,
            "rope_parameters": {**_LONG, **_FACTORS, "short_mscale": 1.0, "long_mscale": 1.6},
        },
    ),
    "gemma3_long": (
        "Gemma3TextConfig",
        {
            **_SLIDING,
            **_UNTIED,
            "layer_types": _TURNS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {**_LONG, **_WIDE_FACTORS},
            },
        },
    ),
}
"""Models whose positions depend on the length of a text."""


@cache
def build(family: str) -> Any:
    """A model that tests share. Each test sets the attention that the test needs, and leaves the attention there."""
    return make(family)


def make(family: str) -> Any:
    """A model in eval mode, with the attention that transformers chooses."""
    kind, options = (FAMILIES | BY_LENGTH)[family]
    config = getattr(transformers, kind)(**options)
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.normal_(0, _SPREAD / parameter.shape[-1] ** 0.5, generator=generator)
    return model
