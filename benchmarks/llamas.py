"""Llama models with random weights in four sizes, and their tokenizer, whose capital letters are one token each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"]
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
    "30M": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 2048,
    },
    "1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
}
"""0.1, 29, 974 and 6,982 million parameters; the last two have the layers of Llama 3.2 1B and Llama 3.1 8B."""


def make(size: str, vocabulary: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A model of `SIZES`, made and drawn on `device` in `dtype`."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES[size],
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=4,
        tie_word_embeddings=False,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight[: len(_SPECIAL)] = 0  # A special token would end an answer of mistralrs.
    return model.eval()


def save(size: str, directory: Path, device: str = "cpu") -> Path:
    """Write a model of `SIZES` with its tokenizer into `directory`, in float32; returns the directory.

    The weights are drawn on `device`.
    """
    words = tokenizer()
    words.save_pretrained(directory)
    make(size, len(words), device).save_pretrained(directory)
    # NOTE: mistralrs reads the older name of the position parameter.
    _edit(directory / "config.json", rope_theta=10000.0, rope_parameters=None)
    _edit(directory / "tokenizer_config.json", chat_template=_TEMPLATE)
    return directory


def tokenizer() -> Any:
    """The tokenizer of all sizes."""
    backend = Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(["hello world this is a tiny tokenizer"] * 10, trainer)
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def _edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
