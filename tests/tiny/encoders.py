"""Tiny models with sparse and token-vector outputs, in the layouts of their families' published checkpoints."""

from __future__ import annotations

import string
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from tests.tiny import vocabularies
from tests.tiny.models import (
    SEED,
    WIDTH,
    bert_config,
    redraw,
    save,
    write_json,
    write_layout,
    xlmr_config,
)

TOKEN_WIDTH = 128


def bge_m3(directory: Path) -> None:
    """XLM-R with BGE-M3's two heads beside it, CLS pooling, normalised."""
    save(transformers.XLMRobertaModel(xlmr_config(directory)), directory)
    write_layout(directory, "cls", max_length=512)
    sparse = {"weight": drawn(1, 1, WIDTH), "bias": torch.ones(1)}
    torch.save(sparse, directory / "sparse_linear.pt")
    tokens = {"weight": drawn(2, WIDTH, WIDTH), "bias": drawn(3, WIDTH)}
    torch.save(tokens, directory / "colbert_linear.pt")


def splade(directory: Path) -> None:
    """BERT with its language-model head, in the layout of sentence-transformers' SparseEncoder."""
    plain_splade(directory)
    kinds = (("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling"))
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": path,
            "type": f"sentence_transformers.sparse_encoder.models.{kind}",
        }
        for at, (kind, path) in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)
    (directory / "1_SpladePooling").mkdir()
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
    write_json(directory / "1_SpladePooling" / "config.json", pooling)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": False})
    stored = {"model_type": "SparseEncoder", "prompts": {}, "similarity_fn_name": "dot"}
    write_json(directory / "config_sentence_transformers.json", stored)


def plain_splade(directory: Path) -> None:
    """The same as transformers saves it."""
    save(transformers.BertForMaskedLM(bert_config(directory)), directory)


def splade_distilbert(directory: Path) -> None:
    """DistilBERT, whose head has parts of its own, with weights by token for queries that need no inference."""
    size = vocabularies.wordpiece(directory)
    config = transformers.DistilBertConfig(
        vocab_size=size, dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=512
    )
    save(transformers.DistilBertForMaskedLM(config), directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    special = set(tokenizer.all_special_ids)
    idf = {token: 1 + at % 7 / 4 for token, at in tokenizer.get_vocab().items() if at not in special}
    write_json(directory / "idf.json", idf)


def colbert_pylate(directory: Path) -> None:
    """BERT and a Dense of 128 without bias, as PyLate saves it: markers, lengths and skip list in one file."""
    config = bert_config(directory, extra=("[Q] ", "[D] "))
    save(transformers.BertModel(config, add_pooling_layer=False), directory)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    write_json(directory / "modules.json", modules)
    (directory / "1_Dense").mkdir()
    identity = "torch.nn.modules.linear.Identity"
    dense = {
        "in_features": WIDTH,
        "out_features": TOKEN_WIDTH,
        "bias": False,
        "activation_function": identity,
    }
    write_json(directory / "1_Dense" / "config.json", {**dense, "use_residual": False})
    save_file({"linear.weight": drawn(2, TOKEN_WIDTH, WIDTH)}, directory / "1_Dense" / "model.safetensors")
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": 179, "do_lower_case": False})
    stored = {
        "model_type": "ColBERT",
        "similarity_fn_name": "MaxSim",
        "prompts": {},
        "default_prompt_name": None,
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 32,
        "document_length": 180,
        "attend_to_expansion_tokens": False,
        "do_query_expansion": True,
        "skiplist_words": list(string.punctuation),
    }
    write_json(directory / "config_sentence_transformers.json", stored)


def colbert_stanford(directory: Path) -> None:
    """BERT and its projection in one file under Stanford's names, with artifact.metadata."""
    config = bert_config(directory, extra=("[unused0]", "[unused1]"))
    config.architectures = ["HF_ColBERT"]
    model = redraw(transformers.BertModel(config, add_pooling_layer=False))
    weights = {f"bert.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    weights["linear.weight"] = drawn(3, TOKEN_WIDTH, WIDTH)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(directory))
    stored = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_token": "[Q]",
        "doc_token": "[D]",
        "dim": TOKEN_WIDTH,
        "query_maxlen": 32,
        "doc_maxlen": 180,
        "mask_punctuation": True,
        "attend_to_mask_tokens": False,
        "similarity": "cosine",
    }
    write_json(directory / "artifact.metadata", stored)


BUILDERS = {
    builder.__name__: builder
    for builder in (bge_m3, splade, plain_splade, splade_distilbert, colbert_pylate, colbert_stanford)
}


def drawn(number: int, *shape: int) -> torch.Tensor:
    """Random weights of a head; the same for the same `number`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED + number)) * 0.2
