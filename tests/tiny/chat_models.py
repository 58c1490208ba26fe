"""Complete tiny chat models: `save("qwen3", directory)` writes tokenizer, chat template, weights and end tokens.

Weights come from a fixed seed, so the words mean nothing. The vocabulary is padded to a multiple of 64, as that of
published models is: the last ids stand for no text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from tests.tiny import chat_tokenizers, models

CONTEXT = 2048
"""Positions of each model, unless `save` is told another number."""
_ROPE = {"max_position_embeddings": CONTEXT, "num_key_value_heads": 2}
_SIZES = {**models.SIZES, **_ROPE, "head_dim": 16}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "rope_parameters": _PLAIN_ROPE,
}
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, _SIZES),
    "qwen2": (transformers.Qwen2Config, {**models.SIZES, **_ROPE}),
    "qwen3": (transformers.Qwen3Config, _SIZES),
    "mistral": (transformers.MistralConfig, {**_SIZES, "sliding_window": None}),
    "gemma3": (transformers.Gemma3TextConfig, {**_SIZES, "sliding_window": 64}),
    "gpt_oss": (transformers.GptOssConfig, {**_SIZES, **_EXPERTS}),
    "phi3": (transformers.Phi3Config, {**models.SIZES, **_ROPE}),
}
ARCHITECTURES = {
    "chatml": "llama",
    "qwen3": "qwen3",
    "qwen3_coder": "qwen3",
    "llama3": "llama",
    "mistral": "mistral",
    "mistral3": "mistral",
    "deepseek": "qwen2",
    "gemma": "gemma3",
    "gemma4": "gemma3",
    "harmony": "gpt_oss",
    "phi3": "phi3",
}
"""Architecture of the tiny model of each kind of `chat_tokenizers`."""


def save(kind: str, directory: Path, context: int = CONTEXT) -> Path:
    """Write a whole model directory of a kind, which is made, for texts of `context` tokens; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = chat_tokenizers.save(kind, directory, max(context, chat_tokenizers.CONTEXT))
    ends = chat_tokenizers.end_ids(kind, tokenizer)
    make, sizes = _CONFIGS[ARCHITECTURES[kind]]
    config = make(
        **(sizes | {"max_position_embeddings": context}),
        vocab_size=-(-len(tokenizer) // 64) * 64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0],
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    models.save(model, directory)
    transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(str(directory))
    return directory


def write_entry(catalog: Path, name: str, directory: Path) -> None:
    """Write the catalog file of the model in `directory`."""
    entry = {
        "id": name,
        "source": {"kind": "directory", "path": str(directory)},
        "adapter": "causal",
        "outputs": {"chat": {}},
    }
    (catalog / f"{name.replace('/', '-')}.yaml").write_text(json.dumps(entry))
