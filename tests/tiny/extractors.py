"""Tiny models that find something in a text: tags, classes, entities by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import vocabularies
from tests.tiny.models import SIZES, WIDTH, bert_config, redraw, save, xlmr_config

NER_TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
NLI_LABELS = ("entailment", "neutral", "contradiction")
MOODS = ("anger", "joy", "fear", "calm")


def ner(directory: Path) -> None:
    """BERT with a tag per token."""
    save(transformers.BertForTokenClassification(bert_config(directory, **_named(NER_TAGS))), directory)


def ner_xlmr(directory: Path) -> None:
    """XLM-R with a tag per token: its tokens carry blanks, and it has no mark inside words."""
    config = xlmr_config(directory, **_named(NER_TAGS))
    save(transformers.XLMRobertaForTokenClassification(config), directory)


def nli(directory: Path) -> None:
    """BERT that tells whether one text follows from another."""
    save(transformers.BertForSequenceClassification(bert_config(directory, **_named(NLI_LABELS))), directory)


def nli_bart(directory: Path) -> None:
    """BART that tells the same, with entailment last and a decoder."""
    size = vocabularies.wordpiece(directory)
    config = transformers.BartConfig(
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=size,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=3,
        **_named(NLI_LABELS[::-1]),
    )
    save(transformers.BartForSequenceClassification(config), directory)


def classifier(directory: Path) -> None:
    """BERT with classes that do not exclude each other."""
    kind = {"problem_type": "multi_label_classification"}
    save(
        transformers.BertForSequenceClassification(bert_config(directory, **_named(MOODS), **kind)), directory
    )


def classifier_causal(directory: Path) -> None:
    """Qwen3 with classes: it reads the last token that is no padding, and padding ends every text."""
    size = vocabularies.byte_level(directory)
    config = transformers.Qwen3Config(
        **SIZES,
        vocab_size=size,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        pad_token_id=size - 1,
        **_named(MOODS),
    )
    save(transformers.Qwen3ForSequenceClassification(config), directory)


def classifier_single(directory: Path) -> None:
    """ModernBERT, mean-pooled, with classes that exclude each other."""
    size = vocabularies.wordpiece(directory)
    config = transformers.ModernBertConfig(
        **SIZES,
        vocab_size=size,
        local_attention=16,
        global_attn_every_n_layers=2,
        max_position_embeddings=512,
        classifier_pooling="mean",
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
        **_named(MOODS),
    )
    save(transformers.ModernBertForSequenceClassification(config), directory)


def gliner(directory: Path) -> None:
    """GLiNER over spans of up to six words."""
    _gliner(directory)


def gliner_token(directory: Path) -> None:
    """GLiNER over single words: first, last and inner ones."""
    _gliner(directory, span_mode="token_level")


def gliner_relex(directory: Path) -> None:
    """GLiNER that also finds relations between its entities."""
    _gliner(directory, relations_layer="dot", triples_layer="DistMult")


def gliner_bi(directory: Path) -> None:
    """GLiNER whose labels go through a narrower encoder of their own."""
    labels = directory / "labels"
    labels.mkdir()
    config = bert_config(labels)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 32, 1
    config.save_pretrained(str(labels))
    _gliner(directory, labels_encoder=str(labels))
    shutil.rmtree(labels)


def gliner2(directory: Path) -> None:
    """GLiNER2 over spans of up to four words."""
    from gliner2.configuration import ExtractorConfig
    from gliner2.models.span.model import SpanExtractorModel

    encoder = bert_config(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    config = ExtractorConfig(model_name="tiny/bert", max_width=4, counting_layer="count_lstm")
    model = redraw(SpanExtractorModel(config, encoder_config=encoder, tokenizer=tokenizer))
    with torch.no_grad():
        model.count_pred[-1].bias.copy_(torch.arange(20) == 3)
        model.count_pred[-1].bias.mul_(1000)
        for parameter in model.span_rep.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(str(directory))


def gliclass(directory: Path) -> None:
    """GLiClass with one encoder for labels and text."""
    from gliclass import GLiClassModel, GLiClassModelConfig

    config = bert_config(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    tokenizer.add_tokens(["<<LABEL>>", "<<SEP>>"], special_tokens=True)
    tokenizer.save_pretrained(str(directory))
    config.vocab_size = len(tokenizer)
    label, separator = tokenizer.convert_tokens_to_ids(["<<LABEL>>", "<<SEP>>"])
    whole = GLiClassModelConfig(
        encoder_config=config,
        encoder_model="tiny/bert",
        class_token_index=label,
        text_token_index=separator,
        hidden_size=WIDTH,
        architecture_type="uni-encoder",
        prompt_first=True,
        pooling_strategy="first",
        scorer_type="simple",
        use_lstm=False,
        vocab_size=len(tokenizer),
        pad_token_id=0,
        max_num_classes=25,
        class_token_pooling="first",
        normalize_features=False,
        extract_text_features=False,
        contrastive_loss_coef=0.0,
    )
    save(GLiClassModel(whole, from_pretrained=False), directory)


BUILDERS: dict[str, Callable[[Path], None]] = {
    builder.__name__: builder
    for builder in (
        ner,
        ner_xlmr,
        nli,
        nli_bart,
        classifier,
        classifier_single,
        classifier_causal,
        gliner,
        gliner_token,
        gliner_relex,
        gliner_bi,
        gliner2,
        gliclass,
    )
}


def _gliner(directory: Path, **layers: str) -> None:
    """A GLiNER with its tokenizer; its saved config names no path."""
    from gliner import GLiNER, GLiNERConfig

    backbone = directory / "backbone"
    backbone.mkdir()
    config = bert_config(backbone)
    config.save_pretrained(str(backbone))
    whole = GLiNERConfig(
        model_name=str(backbone),
        encoder_config=config.to_dict(),
        hidden_size=WIDTH,
        max_width=6,
        max_len=128,
        dropout=0.0,
        num_rnn_layers=1,
        **{"span_mode": "markerV0", **layers},
    )
    made = GLiNER.from_config(whole, backbone_from_pretrained=False)
    made.config.model_name = "tiny/backbone"
    if made.config.labels_encoder:
        made.config.labels_encoder = "tiny/labels"
    redraw(made.model)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(0.65)  # Its scores would all be 0 or 1 otherwise.
    made.save_pretrained(str(directory), safe_serialization=True)
    shutil.rmtree(backbone)


def _named(labels: Sequence[str]) -> dict[str, Any]:
    """Names of a classifier's outputs."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: at for at, label in enumerate(labels)}}
