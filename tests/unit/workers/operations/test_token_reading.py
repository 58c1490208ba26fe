"""Tokens for callers: the tokens, places and texts that transformers gives, whole whatever the model's length."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ipc.errors import InvalidInput
from ipc.wire import tokens
from ipc.wire.messages import InputItem, TokenizeCall
from tests.fakes.adapter import FakeAdapter
from tests.fakes.jobs import adapter
from tests.tiny.texts import mixed_lengths, sentences
from tests.tiny.vocabularies import byte_level, unigram, wordpiece
from workers import operations
from workers.adapters.base import ItemRefused
from workers.inputs import NOTHING
from workers.operations.items import Tokenize, TokenReader

TEXTS = [*mixed_lengths(), *sentences()[:4], "Grüße, 世界 👋🏽", ""]


@pytest.mark.parametrize("vocabulary", [wordpiece, byte_level, unigram])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_texts_are_those_of_transformers(tmp_path: Path, vocabulary: Any, special: bool) -> None:
    vocabulary(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, model_max_length=8)
    tokenizer("cut", truncation=True, max_length=3)
    reader = TokenReader(tokenizer)
    for text, found in zip(TEXTS, reader.read(TEXTS, add_special=special), strict=True):
        wanted = AutoTokenizer.from_pretrained(tmp_path)(
            text, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        assert found.ids == wanted["input_ids"]
        assert list(zip(found.starts, found.ends, strict=True)) == wanted["offset_mapping"]
        assert found.special == [bool(flag) for flag in wanted["special_tokens_mask"]]
        assert found.strings == tokenizer.convert_ids_to_tokens(found.ids)
        back = reader.text_of(InputItem(None, found.ids), keep_special=special)
        assert back == tokenizer.decode(found.ids, skip_special_tokens=not special)


def test_an_id_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    wordpiece(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    size, reader = len(tokenizer), TokenReader(tokenizer)
    for number in (-1, size, 2**31 - 1):
        with pytest.raises(ItemRefused, match=re.escape(f"token id {number} is outside")):
            reader.text_of(InputItem(None, [0, number]), keep_special=True)


def test_a_model_without_a_tokenizer_refuses_the_operation(tmp_path: Path) -> None:
    call = TokenizeCall([InputItem("a")], True)
    with pytest.raises(InvalidInput, match="no tokenizer"):
        operations.check(adapter(tokenizer=None), call)
    with pytest.raises(InvalidInput, match="not a fast one"):
        TokenReader(SimpleNamespace(is_fast=False)).read(["a"], add_special=True)


def test_the_operation_answers_with_the_prepared_items(tmp_path: Path) -> None:
    wordpiece(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    reader = TokenReader(tokenizer)
    [expected] = reader.read([sentences()[0]], add_special=True)
    call = TokenizeCall([InputItem("x"), InputItem(sentences()[0]), InputItem(None, expected.ids)], False)
    model: Any = FakeAdapter({}, 512)
    model.tokenizer = tokenizer
    operation = Tokenize()
    prepared: Any = operation.prepare(model, call, 1, 3, NOTHING)
    assert [item.cost for item in prepared] == [len(expected.ids) - sum(expected.special), len(expected.ids)]
    first, second = operation.run(model, prepared, call).loose["tokens"]
    [plain] = reader.read([sentences()[0]], add_special=False)
    assert tokens.unpack(first.data) == plain
    assert bytes(second).decode() == reader.text_of(call.items[2], keep_special=False)
    assert first.dtype == second.dtype == np.uint8
