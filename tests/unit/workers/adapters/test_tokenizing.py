"""Tokenizing from several threads, with limits, lower-casing and odd texts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ipc.wire.messages import InputItem
from tests.tiny.texts import mixed_lengths, sentences
from tests.tiny.vocabularies import byte_level, wordpiece
from workers.adapters.base import ItemRefused
from workers.adapters.shared.tokenizing import TextTokenizer


@pytest.fixture()
def cased(tmp_path: Path) -> Path:
    """A BERT tokenizer that keeps case."""
    wordpiece(tmp_path, lower_case=False)
    return tmp_path


def test_ids_equal_those_of_transformers(cased: Path) -> None:
    tokenizer = TextTokenizer.read(cased)
    tokenizer.limit(12)
    wanted = AutoTokenizer.from_pretrained(cased)(mixed_lengths(), truncation=True, max_length=12)[
        "input_ids"
    ]
    assert [tokens.ids for tokens in tokenizer.encode(mixed_lengths())] == wanted


def test_many_threads_get_the_same_ids_as_one(cased: Path) -> None:
    tokenizer = TextTokenizer.read(cased)
    tokenizer.limit(16)
    wanted = tokenizer.encode(sentences())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tokenizer.encode, [sentences()] * 32))
    assert all(tokens == wanted for tokens in found)


def test_cut_texts_keep_their_closing_token_and_are_flagged(cased: Path) -> None:
    tokenizer = TextTokenizer.read(cased)
    tokenizer.limit(6)
    short, exact, long = tokenizer.encode(["river", "river river river river", "river " * 5])
    assert [short.truncated, exact.truncated, long.truncated] == [False, False, True]
    assert len(exact.ids) == len(long.ids) == 6 and long.ids[-1] == exact.ids[-1]


def test_lower_casing_is_added_only_where_asked(cased: Path) -> None:
    plain, lowered = TextTokenizer.read(cased), TextTokenizer.read(cased, lower_case=True)
    assert lowered.encode(["RIVER Der"])[0].ids == plain.encode(["river der"])[0].ids
    assert plain.encode(["RIVER Der"])[0].ids != plain.encode(["river der"])[0].ids


def test_a_text_without_any_token_still_gets_one(tmp_path: Path) -> None:
    byte_level(tmp_path)
    slow = AutoTokenizer.from_pretrained(tmp_path)
    end = slow.eos_token_id
    slow.backend_tokenizer.post_processor = None
    assert TextTokenizer(slow).encode(["", "a"])[0].ids == [end]


def test_ids_of_a_caller_stay_as_they_are_and_a_prompt_goes_behind_their_special_tokens(cased: Path) -> None:
    tokenizer = TextTokenizer.read(cased)
    tokenizer.limit(8)
    tokenizer.knows(50)

    def read(
        ids: list[int], around: tuple[str, str] = ("", ""), overflow: str = "truncate"
    ) -> list[list[int]]:
        [(fitted, _)] = tokenizer.fitted([InputItem(ids=ids)], around, overflow)
        return [window.ids for window in fitted.windows]

    [cls, *inner, sep] = tokenizer.encode(["the river"])[0].ids
    assert read([cls, 1, 0, 49, sep]) == [[cls, 1, 0, 49, sep]]
    assert read([1, sep, 7]) == [[1, sep, 7]], "no special tokens are added"
    assert read([cls, 7, sep], ("the river ", "")) == [[cls, *inner, 7, sep]]
    assert read([7], ("", " the river")) == [[7, *inner]]
    long = [cls, *range(10, 20), sep]
    assert read(long) == [[cls, *range(10, 16), sep]]
    assert read(long, overflow="truncate_left") == [[cls, *range(14, 20), sep]]
    assert read(long, overflow="chunk") == [[cls, *range(10, 16), sep], [cls, *range(16, 20), sep]]
    assert read(long[1:-1]) == [list(range(10, 18))]
    with pytest.raises(ItemRefused, match="token id 50 is outside this model's vocabulary of 50"):
        read([cls, 50, sep])


def test_the_length_of_a_prefix_leaves_out_the_closing_token(cased: Path) -> None:
    tokenizer = TextTokenizer.read(cased)
    whole = tokenizer.encode(["the river"])[0].ids
    assert tokenizer.prefix_length("the river") == len(whole) - 1
