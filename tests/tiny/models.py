"""Build one tiny model directory by name: `build("dense_mean", directory)`.

Every model has the layout of its family's published checkpoints and opens by the ordinary loading path of the
reference libraries.  Weights come from a fixed seed and are drawn with a wide spread: with the usual narrow one all
texts get nearly the same vector, and a test would pass on anything.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.tiny import vocabularies

MODULES = (
    "tests.tiny.models",
    "tests.tiny.encoders",
    "tests.tiny.extractors",
    "tests.tiny.rerankers",
    "tests.tiny.detectors",
    "tests.tiny.readers",
    "tests.tiny.towers",
    "tests.tiny.ocr",
)
"""Where builders are looked for: each module has `BUILDERS` by name."""
SEED = 20240607
WIDTH = 64
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_QUERY = {"query": "Represent this sentence for searching relevant passages: "}
_POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def build(name: str, directory: Path) -> Path:
    """Write the model called `name` into `directory`, which is made, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    for module in MODULES:
        builders = importlib.import_module(module).BUILDERS
        if name in builders:
            builders[name](directory)
            return directory
    raise KeyError(f"no tiny model is called {name!r}")


def dense_mean(directory: Path) -> None:
    """BERT, mean pooling, normalised."""
    _bert(directory)
    write_layout(directory, "mean")


def dense_cls(directory: Path) -> None:
    """BERT, CLS pooling, normalised, with a query prompt."""
    _bert(directory)
    write_layout(directory, "cls", prompts=_QUERY)


def dense_last(directory: Path) -> None:
    """Qwen3 (causal, grouped keys and values), last token, normalised, with a query prompt."""
    size = vocabularies.byte_level(directory)
    config = transformers.Qwen3Config(
        **SIZES, vocab_size=size, num_key_value_heads=2, head_dim=16, max_position_embeddings=512
    )
    save(transformers.Qwen3Model(config), directory)
    write_layout(directory, "lasttoken", prompts={"query": "Instruct: find passages\nQuery:", "document": ""})


def dense_modernbert(directory: Path) -> None:
    """ModernBERT with local and global attention layers, CLS pooling, normalised."""
    size = vocabularies.wordpiece(directory)
    config = transformers.ModernBertConfig(
        **{**SIZES, "num_hidden_layers": 4},
        vocab_size=size,
        local_attention=16,
        global_attn_every_n_layers=3,
        max_position_embeddings=512,
        **_special_ids(0, 2, 3),
    )
    save(transformers.ModernBertModel(config), directory)
    write_layout(directory, "cls")


def dense_xlmr(directory: Path) -> None:
    """XLM-R, whose positions start at 2, mean pooling, normalised."""
    save(transformers.XLMRobertaModel(xlmr_config(directory)), directory)
    write_layout(directory, "mean", max_length=512)


def dense_projected(directory: Path) -> None:
    """BERT, two poolings side by side, a Dense with tanh, a LayerNorm, not normalised."""
    _bert(directory)
    write_layout(directory, "cls", "mean", normalize=False, heads=("Dense", "LayerNorm"))
    generator = torch.Generator().manual_seed(SEED + 1)
    dense = {
        "linear.weight": torch.randn(32, 2 * WIDTH, generator=generator) * 0.1,
        "linear.bias": torch.ones(32),
    }
    _write_module(
        directory / "2_Dense",
        {
            "in_features": 2 * WIDTH,
            "out_features": 32,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
        dense,
    )
    norm = {
        "norm.weight": torch.randn(32, generator=generator),
        "norm.bias": torch.randn(32, generator=generator),
    }
    _write_module(directory / "3_LayerNorm", {"dimension": 32}, norm)


def dense_weighted(directory: Path) -> None:
    """BERT whose pooling leaves the prompt out: weighted mean and maximum side by side."""
    _bert(directory)
    write_layout(directory, "max", "weightedmean", prompts=_QUERY, include_prompt=False)


def dense_lowered(directory: Path) -> None:
    """BERT with a tokenizer that keeps case and a layout that lower-cases and cuts at 16 tokens."""
    _bert(directory, lower_case=False)
    write_layout(directory, "mean_sqrt_len_tokens", lower_case=True, max_length=16)


def plain_bert(directory: Path) -> None:
    """BERT as transformers saves it, without modules.json."""
    _bert(directory)


def dense_mpnet(directory: Path) -> None:
    """MPNet, which bypasses transformers' attention registry, mean pooling, normalised."""
    size = vocabularies.wordpiece(directory, pad_id=1)
    config = transformers.MPNetConfig(**SIZES, vocab_size=size, **_special_ids(1, 2, 3))
    save(transformers.MPNetModel(config), directory)
    write_layout(directory, "mean")


def dense_t5(directory: Path) -> None:
    """A whole T5, of which only the encoder counts; its attention has a position bias.  Mean pooling, normalised."""
    size = vocabularies.unigram(directory)
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    save(transformers.T5Model(transformers.T5Config(**sizes, vocab_size=size, pad_token_id=1)), directory)
    write_layout(directory, "mean")


def dense_longrope(directory: Path) -> None:
    """Llama whose rotary factors are others from 65 tokens on, mean pooling, normalised."""
    size = vocabularies.byte_level(directory)
    factors = {
        "short_factor": [1.0] * 8,
        "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
        "factor": 4.0,
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=size, num_key_value_heads=2, max_position_embeddings=256, rope_parameters=rope
    )
    save(transformers.LlamaModel(config), directory)
    write_layout(directory, "mean")


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder
    for builder in (
        dense_mean,
        dense_cls,
        dense_last,
        dense_modernbert,
        dense_xlmr,
        dense_projected,
        dense_weighted,
        dense_lowered,
        plain_bert,
        dense_mpnet,
        dense_t5,
        dense_longrope,
    )
}


def write_layout(
    directory: Path,
    *modes: str,
    normalize: bool = True,
    heads: tuple[str, ...] = (),
    prompts: dict[str, str] | None = None,
    max_length: int = 256,
    lower_case: bool = False,
    include_prompt: bool = True,
) -> None:
    """Write the files of the sentence-transformers layout around a saved transformer."""
    kinds = ("Transformer", "Pooling", *heads, *(("Normalize",) if normalize else ()))
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    for module in modules[1:]:
        (directory / str(module["path"])).mkdir(exist_ok=True)
    write_json(directory / "modules.json", modules)
    flags = {flag: mode in modes for mode, flag in _POOLING_FLAGS.items()}
    pooling = {"word_embedding_dimension": WIDTH, "include_prompt": include_prompt, **flags}
    write_json(directory / "1_Pooling" / "config.json", pooling)
    write_json(
        directory / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": lower_case}
    )
    stored = {"prompts": prompts or {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(directory / "config_sentence_transformers.json", stored)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _bert(directory: Path, *, lower_case: bool = True) -> None:
    """A BERT with its tokenizer."""
    save(transformers.BertModel(bert_config(directory, lower_case=lower_case)), directory)


def bert_config(
    directory: Path, *, lower_case: bool = True, extra: tuple[str, ...] = (), **more: Any
) -> transformers.BertConfig:
    """The config of a BERT whose tokenizer, with `extra` tokens, is written to `directory`."""
    size = vocabularies.wordpiece(directory, lower_case=lower_case, extra=extra)
    return transformers.BertConfig(**SIZES, vocab_size=size, max_position_embeddings=512, **more)


def xlmr_config(directory: Path, **more: Any) -> transformers.XLMRobertaConfig:
    """The config of an XLM-R whose tokenizer is written to `directory`; its positions start at 2."""
    return transformers.XLMRobertaConfig(
        **SIZES,
        vocab_size=vocabularies.unigram(directory),
        max_position_embeddings=258,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **more,
    )


def _special_ids(pad: int, cls: int, sep: int) -> dict[str, int]:
    """Special token ids for configs whose defaults do not fit the tiny vocabulary."""
    ids = {"pad_token_id": pad, "bos_token_id": cls, "eos_token_id": sep}
    return {**ids, "cls_token_id": cls, "sep_token_id": sep}


def save(model: Any, directory: Path) -> None:
    """Redraw the weights and save them."""
    redraw(model).save_pretrained(str(directory))


def redraw(model: Any) -> Any:
    """The model in eval mode with weights drawn from the seed, words outweighing positions."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                scale = 0.6 if "word_embeddings" in name or "tok_embeddings" in name else 0.15
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.eval()


def _write_module(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """One module of the layout: its config and weights."""
    directory.mkdir(exist_ok=True)
    write_json(directory / "config.json", config)
    save_file(weights, str(directory / "model.safetensors"))
