"""Tokenizers over the test sentences, the same in every run.

WordPiece and Unigram vocabularies are made by counting, since the trainers of those two break ties differently from
run to run; the byte-level BPE trainer does not.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AddedToken, BertTokenizerFast, CLIPTokenizer, Qwen2Tokenizer, XLMRobertaTokenizer

from tests.tiny.texts import sentences

_END = "<|endoftext|>"


def wordpiece(
    directory: Path, *, pad_id: int = 0, lower_case: bool = True, extra: tuple[str, ...] = ()
) -> int:
    """Write a BERT tokenizer with `extra` pieces; every sixth word is left out so that it splits.

    Returns the vocabulary size.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    splitter = pre_tokenizers.BertPreTokenizer()
    words = _counted(
        word for text in sentences() for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
    )
    letters = sorted({letter for word in words for letter in word})
    kept = [word for index, word in enumerate(words) if index % 6 != 5]
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special.insert(pad_id, "[PAD]")
    pieces = dict.fromkeys([*special, *letters, *("##" + letter for letter in letters), *kept, *extra])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = BertTokenizerFast(vocab=vocabulary, do_lower_case=lower_case, model_max_length=512)
    tokenizer.save_pretrained(str(directory))
    return len(vocabulary)


def unigram(directory: Path) -> int:
    """Write an XLM-R tokenizer with pad id 1; returns the vocabulary size."""
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    words = _counted(word for text in sentences() for word, _ in splitter.pre_tokenize_str(text))
    total = sum(words.values())
    letters = sorted({letter for word in words for letter in word})
    kept = [(word, math.log(count / total)) for word, count in words.items() if len(word) > 1]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary = [*special, *kept, *((letter, -12.0) for letter in letters), ("<mask>", 0.0)]
    XLMRobertaTokenizer(vocab=vocabulary, model_max_length=512).save_pretrained(str(directory))
    return len(vocabulary)


def byte_level(directory: Path) -> int:
    """Write a Qwen tokenizer that ends every text with an end marker; returns the vocabulary size."""
    vocabulary, merges = byte_pairs()
    tokenizer: Any = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token=_END,
        pad_token=_END,
        model_max_length=512,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(_END, special=True)])
    end_id = tokenizer.convert_tokens_to_ids(_END)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {_END}", pair=f"$A {_END} $B {_END}", special_tokens=[(_END, end_id)]
    )
    tokenizer.save_pretrained(str(directory))
    return len(tokenizer)


def byte_pairs(special: tuple[str, ...] = ()) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary, `special` pieces first, and merges of a byte-level BPE over the test sentences."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(special), show_progress=False, initial_alphabet=alphabet
    )
    trained.train_from_iterator(sentences(), trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def clip_letters(directory: Path, limit: int) -> Any:
    """Write a CLIP tokenizer without merges, nearly one token per letter, for texts of `limit` tokens; returns it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["!", *(letter + end for end in ("", "</w>") for letter in letters)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer: Any = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=limit, pad_token="!")
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def _counted(words: Iterable[str]) -> dict[str, int]:
    """Words with their counts, most frequent first, ties by spelling."""
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))
