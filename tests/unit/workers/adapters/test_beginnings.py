"""The beginning of a long text has the tokens of the whole, whatever characters it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.tiny.vocabularies import byte_level, byte_pairs, clip_letters, unigram, wordpiece
from workers.adapters.shared.long_texts import encode_beginning, goes_word_by_word
from workers.adapters.shared.pairs import PairTokenizer
from workers.adapters.shared.tokenizing import TextTokenizer

LIMIT = 8
# Blanks of all kinds, marks that join what stands before them, special tokens, characters that normalizers widen.
ODD = [
    *"aZé\u0301¨ﬁﷺ東京\u00a0\u2009\t\n\u200d\u0600Σ.,-_'\"#@`½",
    "[SEP]",
    "<s>",
    "<mask>",
    "``",
    "''",
    "river",
    "  ",
]
WORDS = st.lists(
    st.one_of(st.sampled_from([*ODD, " ", " ", " "]), st.characters(codec="utf-8", exclude_characters="\0"))
)
TEXTS = st.tuples(WORDS.map("".join), WORDS.map("".join), st.integers(0, 400)).map(
    lambda parts: parts[0] + " the river" * parts[2] + parts[1] + (parts[0] + " ") * 40
)


def plain_bytes(directory: Path) -> None:
    """Write a byte-level tokenizer as GPT-2 has it."""
    vocabulary, merges = byte_pairs(("<s>", "<mask>"))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", mask_token="<mask>").save_pretrained(
        str(directory)
    )


MAKERS: dict[str, Callable[[Path], Any]] = {
    "wordpiece": wordpiece,
    "unigram": unigram,
    "bytes": plain_bytes,
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A tokenizer that cuts at a few tokens."""
    directory = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param](directory)
    made = TextTokenizer.read(directory)
    made.limit(LIMIT)
    return made


PAIRS = [
    (maker, strategy) for maker in ("wordpiece", "unigram") for strategy in ("only_first", "longest_first")
]


@pytest.fixture(scope="module", params=PAIRS, ids=" ".join)
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairTokenizer:
    """The same for pairs."""
    maker, strategy = request.param
    directory = tmp_path_factory.mktemp(f"pairs-{maker}-{strategy}")
    MAKERS[maker](directory)
    return PairTokenizer(AutoTokenizer.from_pretrained(directory), 2 * LIMIT, strategy)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_a_beginning_has_the_tokens_of_the_whole(tokenizer: TextTokenizer, text: str) -> None:
    backend: Any = tokenizer._backend
    [whole] = backend.encode_batch_fast([text])
    found = encode_beginning(backend, text, LIMIT)
    assert (found.ids, found.type_ids) == (whole.ids, whole.type_ids)
    assert bool(found.overflowing) == bool(whole.overflowing)
    assert tokenizer.encode([text, "river"])[0].ids == (whole.ids or [tokenizer._filler])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_a_shorter_window_is_that_of_the_whole(tokenizer: TextTokenizer, text: str) -> None:
    [(found, cut, _)] = tokenizer.windows([text], "truncate", LIMIT - 2)
    [(whole, was_cut, _)] = tokenizer.windows([text], "error", LIMIT - 2)
    assert (found, cut) == (whole, was_cut)


@pytest.mark.sample(4)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=TEXTS, words=st.integers(1, LIMIT))
@pytest.mark.parametrize("overflow", ["truncate", "truncate_left", "error"])
def test_a_pair_with_one_side_of_a_text_is_that_with_the_whole(
    pairs: PairTokenizer, text: str, words: int, overflow: str
) -> None:
    [second], [side], [whole] = (
        pairs.halves(["river " * words]),
        pairs.sides([text], overflow),
        pairs.halves([text]),
    )
    assert len(side.ids) == len(whole.ids) or (overflow != "error" and len(side.ids) > pairs.limit)
    found, expected = pairs.join(side, second, overflow), pairs.join(whole, second, overflow)
    assert found.sequence.ids.tolist() == expected.sequence.ids.tolist()
    assert found.truncated == expected.truncated
    assert (found.tokens == expected.tokens) or overflow != "error"


def test_only_one_side_of_a_long_text_takes_part_in_pairs(pairs: PairTokenizer) -> None:
    for overflow in ("truncate", "truncate_left"):
        [side] = pairs.sides(["the river " * 10_000], overflow)
        assert len(side.ids) < 1000


def test_only_the_beginning_of_a_long_text_is_read(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = tokenizer._backend
    read: list[int] = []

    class Noted:
        """The Rust object, which takes no attributes, with the lengths of what it reads."""

        def __getattr__(self, name: str) -> Any:
            method = getattr(backend, name)
            return lambda texts: (read.extend(map(len, texts)), method(texts))[1]

    monkeypatch.setattr(tokenizer, "_backend", Noted())
    text = "the river " * 10_000
    [found] = tokenizer.encode([text])
    assert found.truncated and len(found.ids) == LIMIT and sum(read) < 1000
    read.clear()
    tokenizer.encode(["a" * 100_000 + " " + text])
    assert max(read) > 100_000, "a word that long has to be read"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (wordpiece, True),
        (unigram, True),
        (plain_bytes, True),
        (byte_level, False),
        (lambda place: clip_letters(place, 77), False),
    ],
    ids=["wordpiece", "unigram", "bytes", "a pattern", "CLIP"],
)
def test_tokenizers_with_patterns_of_their_own_read_the_whole(
    tmp_path: Path, make: Callable[[Path], Any], expected: bool
) -> None:
    make(tmp_path)
    made: Any = TextTokenizer.read(tmp_path)
    assert goes_word_by_word(made._backend) == expected
    made.limit(LIMIT)
    assert made._only_beginnings == expected


def test_what_may_look_further_than_a_word_is_not_trusted() -> None:
    backend = Tokenizer(models.BPE())
    assert not goes_word_by_word(backend), "without words everything is one"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    assert not goes_word_by_word(backend)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    assert goes_word_by_word(backend)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("the end", "")])
    assert not goes_word_by_word(backend)


def test_texts_that_are_cut_on_the_left_are_read_whole(tmp_path: Path) -> None:
    wordpiece(tmp_path)
    made: Any = TextTokenizer.read(tmp_path)
    made._tokenizer.truncation_side = "left"
    made.limit(LIMIT)
    text = "the river " * 1000 + "bridge"
    assert made.encode([text])[0].ids == made._backend.encode(text).ids
    assert made.encode([text])[0].ids[-2] == made.encode(["bridge"])[0].ids[-2]
