"""Tiny models that read a query and a document together and say how well they fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import transformers

from tests.tiny import vocabularies
from tests.tiny.models import SIZES, bert_config, save, xlmr_config


def rr_bert(directory: Path) -> None:
    """BERT with one label; its pairs have segments."""
    save(transformers.BertForSequenceClassification(bert_config(directory, num_labels=1)), directory)


def rr_bert_logits(directory: Path) -> None:
    """The same, and its config says that scores are the logits themselves."""
    config = bert_config(directory, num_labels=1)
    config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "6.2.0"}
    save(transformers.BertForSequenceClassification(config), directory)


def rr_bert_three(directory: Path) -> None:
    """BERT with three labels: no reranker."""
    config = bert_config(directory, num_labels=1)
    config.num_labels = 3
    save(transformers.BertForSequenceClassification(config), directory)


def rr_xlmr(directory: Path) -> None:
    """XLM-R with one label; its pairs have two markers between their halves and no segments."""
    config = xlmr_config(directory, num_labels=1)
    save(transformers.XLMRobertaForSequenceClassification(config), directory)


def rr_modernbert(directory: Path) -> None:
    """ModernBERT with local attention, one label, and a head over the mean of all tokens."""
    size = vocabularies.wordpiece(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(str(directory))
    config = transformers.ModernBertConfig(
        **{**SIZES, "num_hidden_layers": 4},
        vocab_size=size,
        local_attention=16,
        global_attn_every_n_layers=3,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
        classifier_pooling="mean",
        num_labels=1,
    )
    save(transformers.ModernBertForSequenceClassification(config), directory)


def rr_qwen3(directory: Path) -> None:
    """Qwen3 with a tied language-model head and the words that answer."""
    vocabularies.byte_level(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    marks = [transformers.AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    words = [transformers.AddedToken(word, single_word=True, normalized=False) for word in ("yes", "no")]
    tokenizer.add_tokens([*marks, *words])
    tokenizer.save_pretrained(str(directory))
    config = transformers.Qwen3Config(
        **SIZES,
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    save(transformers.Qwen3ForCausalLM(config), directory)


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder
    for builder in (rr_bert, rr_bert_logits, rr_bert_three, rr_xlmr, rr_modernbert, rr_qwen3)
}
