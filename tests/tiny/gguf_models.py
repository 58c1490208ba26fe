"""Tiny models in GGUF files: `write(path, family)` gives the model of transformers that the file holds.

1. The model has seeded weights. The file stores them under llama.cpp's names and in its order, written here by hand.
2. Weights of the types that the package `gguf` can make are rounded to their blocks. Blocks of the other types are
   drawn, and the model gets the numbers that they stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.tiny import chat_tokenizers

CONTEXT = 512
_SEED = 20261128
_SPREAD = 0.6
_BASE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_HEADS = {**_BASE, "head_dim": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_GEMMA = {**_HEADS, "sliding_window": 24, "query_pre_attn_scalar": 128, "rms_norm_eps": 1e-6}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _BASE),
    "qwen2": ("Qwen2Config", {**_BASE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_HEADS, "tie_word_embeddings": True}),
    "qwen2moe": ("Qwen2MoeConfig", {**_BASE, **_EXPERTS, "shared_expert_intermediate_size": 512}),
    "qwen3moe": ("Qwen3MoeConfig", {**_HEADS, **_EXPERTS, "norm_topk_prob": True}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "num_hidden_layers": 7}),
    "phi3": ("Phi3Config", {**_BASE, "sliding_window": 24}),
}
"""The configuration of each architecture: its class in transformers, and what differs from the defaults."""
_NAMES = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.(\d+)\.", r"blk.\1."),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"self_attn\.qkv_proj", "attn_qkv"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"mlp\.shared_expert\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.gate\.", "ffn_gate_inp."),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"input_layernorm", "attn_norm"),
)
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def write(
    path: Path,
    family: str = "llama",
    kind: str = "F32",
    *,
    parts: int = 1,
    options: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Any:
    """Write the model into the file, or into `parts` files beside each other, and return the model of transformers.

    `kind` is the block type of all matrices. `options` go into the configuration; `fields` and `tensors` are further
    ones of the file, where a field of the value None is left out.
    """
    tokenizer = chat_tokenizers.build("chatml")
    model = _model(family, options or {}, tokenizer)
    stored = dict(_weights(model, family, kind))
    stored |= {name: (array, gguf.GGMLQuantizationType.F32) for name, array in (tensors or {}).items()}
    names = [str(path)]
    if parts > 1:
        names = [str(path.with_name(f"{path.stem}-{n:05d}-of-{parts:05d}.gguf")) for n in range(1, parts + 1)]
    described = {**_described(model.config, family), **_words(tokenizer), **(fields or {})}
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, family)
        own = described if number == 0 else {}
        counts = (
            {"split.no": number, "split.count": parts, "split.tensors.count": len(stored)}
            if parts > 1
            else {}
        )
        for field, value in {**own, **counts}.items():
            if value is not None:
                _add(writer, field, value)
        for tensor, (array, block) in list(stored.items())[number::parts]:
            writer.add_tensor(tensor, array, raw_dtype=block)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return model


def _model(family: str, options: Mapping[str, Any], tokenizer: Any) -> Any:
    name, stated = FAMILIES[family]
    ids = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    kind = getattr(transformers, name)
    config = kind(**{**stated, "vocab_size": len(tokenizer), **ids, **options})
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(_SEED)
    for parameter in model.parameters():
        parameter.normal_(0, _SPREAD / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def _weights(model: Any, family: str, kind: str) -> list[tuple[str, tuple[np.ndarray, Any]]]:
    """Names, blocks and types of the tensors of a file; the model's weights become what the blocks stand for."""
    found = []
    for name, weight in model.named_parameters():
        rows = weight.numpy()
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(rows, 2, axis=1)
            both = [_blocks(half, kind) for half in (gate, up)]
            weight.copy_(torch.from_numpy(np.concatenate([_numbers(*each) for each in both], axis=1)))
            layer = name.split(".")[2]
            found += [
                (f"blk.{layer}.ffn_{part}_exps.weight", each)
                for part, each in zip(("gate", "up"), both, strict=True)
            ]
            continue
        stored = _stored_name(name, family)
        turned = family == "llama" and re.search(r"attn_[qk]\.", stored)
        heads = model.config.num_attention_heads if "attn_q" in stored else model.config.num_key_value_heads
        if turned:
            rows = rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        if family.startswith("gemma") and stored.endswith("norm.weight"):
            rows = rows + 1
        block = _blocks(rows, kind if rows.ndim > 1 and "ffn_gate_inp" not in stored else "F32")
        found.append((stored, block))
        numbers = _numbers(*block)
        if turned:
            numbers = numbers.reshape(heads, -1, 2, numbers.shape[-1]).swapaxes(1, 2).reshape(numbers.shape)
        if family.startswith("gemma") and stored.endswith("norm.weight"):
            numbers = numbers - 1
        weight.copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
    return found


def _stored_name(name: str, family: str) -> str:
    if name.endswith("experts.down_proj"):
        return f"blk.{name.split('.')[2]}.ffn_down_exps.weight"
    for pattern, text in _NAMES:
        name = re.sub(pattern, text, name)
    for theirs, ours in (_GEMMA_NORMS if family.startswith("gemma") else _NORMS).items():
        name = name.replace(theirs, ours)
    return name


def _blocks(rows: np.ndarray, kind: str) -> tuple[np.ndarray, Any]:
    """The blocks of a matrix: rounded, or drawn where the package cannot round."""
    block = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quantize(np.ascontiguousarray(rows), block), block
    except NotImplementedError:
        values, nbytes = gguf.GGML_QUANT_SIZES[block]
        count = rows.size // values
        drawn = np.random.default_rng(rows.size).integers(0, 256, (count, nbytes), dtype=np.uint8)
        scale = np.full((count, 1), _SPREAD / 2000, dtype=np.float16).view(np.uint8)
        drawn[:, -2:] = scale
        if kind in ("Q4_K", "Q5_K"):
            drawn[:, :2] = drawn[:, 2:4] = scale
        return drawn.reshape(*rows.shape[:-1], -1), block


def _numbers(blocks: np.ndarray, block: Any) -> np.ndarray:
    return np.asarray(gguf.dequantize(blocks, block), dtype=np.float32)


def _described(config: Any, family: str) -> dict[str, Any]:
    found = {f"{family}.{theirs}": getattr(config, ours, None) for theirs, ours in _FIELDS.items()}
    rope = config.rope_parameters
    theta = rope["full_attention"]["rope_theta"] if "full_attention" in rope else rope["rope_theta"]
    found |= {
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": float(theta),
    }
    if family == "gemma2":
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        found |= {f"{family}.{name}": float(getattr(config, name)) for name in names}
    return found


def _words(tokenizer: Any) -> dict[str, Any]:
    """Vocabulary, merges and template as a file has them."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    model = tokenizer.backend_tokenizer
    merges = json.loads(model.to_str())["model"]["merges"]
    added = {at: 3 if token.special else 4 for at, token in tokenizer.added_tokens_decoder.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(at, 1) for at in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _add(writer: Any, field: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(field, value)
    elif isinstance(value, int):
        writer.add_uint32(field, value)
    elif isinstance(value, float):
        writer.add_float32(field, value)
    elif isinstance(value, str):
        writer.add_string(field, value)
    else:
        assert isinstance(value, Sequence)
        writer.add_array(field, list(value))
