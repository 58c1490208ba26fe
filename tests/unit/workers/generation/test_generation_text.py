"""Text of tokens: whole characters for every kind of tokenizer, stop strings across borders, ends and their reasons."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ipc.wire.messages import Ending, GenerateCall, ToolUse
from ipc.wire.streams import FINISHED, HELD, REASONING, TEXT, TokenLogprob
from tests.tiny import chat_tokenizers
from workers.generation.formats.table import detect
from workers.generation.request import Emission, GenerationRequest
from workers.generation.text import HELD_TOKENS, ChoiceOutput, Vocabulary

KINDS = sorted(chat_tokenizers.KINDS)
TEXTS = ("Hello there", "naïve 你好 🙂🙃 end", "  two  blanks\n\n\ttab", "a<b>c{d}\u00a0e", "🙂")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {kind: chat_tokenizers.save(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def request_of(
    stop: tuple[str, ...] = (), stop_ids: frozenset[int] = frozenset(), limit: int = 1000
) -> GenerationRequest:
    call = GenerateCall(text="x", ending=Ending(stop=list(stop)))
    return GenerationRequest("key", [1], call, limit, stop_ids)


def run(output: ChoiceOutput, ids: list[int]) -> list[Emission]:
    found: list[Emission] = []
    for token in ids:
        found += output.push(token, None)
        if output.ended is not None:
            break
    return found + output.finish(output.ended or "length")


def text_of(emissions: list[Emission]) -> str:
    return "".join(emission.text for emission in emissions if emission.kind == TEXT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_is_what_was_tokenized_and_every_piece_is_whole(
    tokenizers: dict[str, Any], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    vocabulary = Vocabulary(tokenizer)
    emissions = run(
        ChoiceOutput(vocabulary, request_of(), 0), tokenizer.encode(text, add_special_tokens=False)
    )
    assert text_of(emissions).lstrip(" ") == text.lstrip(" ")
    assert all("\ufffd" not in emission.text for emission in emissions)


def test_a_client_can_send_back_a_text_in_which_the_model_wrote_nul(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen3"]
    ids = tokenizer.encode("a\0b", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a\0b"
    output = ChoiceOutput(Vocabulary(tokenizer), request_of(), 0)
    assert text_of(run(output, ids)) == "a\N{REPLACEMENT CHARACTER}b"
    stopped = ChoiceOutput(Vocabulary(tokenizer), request_of(stop=("\0",)), 0)
    assert text_of(run(stopped, ids)) == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_by_windows_gives_the_same_text(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer, vocabulary = tokenizers[kind], Vocabulary(tokenizers[kind])
    assert vocabulary.is_exact
    vocabulary.is_exact = False
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        emissions = run(ChoiceOutput(vocabulary, request_of(), 0), ids)
        assert text_of(emissions).lstrip(" ") == text.lstrip(" ")
        assert all("\ufffd" not in emission.text for emission in emissions)


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_give_the_text_that_the_tokenizer_decodes(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer, draw = tokenizers[kind], random.Random(5)
    vocabulary = Vocabulary(tokenizer)
    ordinary = [number for number in tokenizer.get_vocab().values() if number not in vocabulary.silent]
    for _ in range(20):
        ids = [draw.choice(ordinary) for _ in range(30)]
        raw = b"".join(map(vocabulary.raw, ids)).decode(errors="replace")
        found = text_of(run(ChoiceOutput(vocabulary, request_of(), 0), ids))
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert raw.lstrip(" ") == decoded.lstrip(" ")
        assert found == raw.replace("\0", "\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("exact", [True, False], ids=["by bytes", "by windows"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_prompt_have_their_places_in_its_text(
    tokenizers: dict[str, Any], kind: str, exact: bool
) -> None:
    tokenizer, vocabulary = tokenizers[kind], Vocabulary(tokenizers[kind])
    vocabulary.is_exact = exact
    for text in (*TEXTS, ""):
        ids = tokenizer.encode(text)
        found = vocabulary.prompt_text(ids, text)
        bare = tokenizer.encode(text, add_special_tokens=False)
        around = len(ids) - len(bare)
        assert ids[around:] == bare, "what frames a text stands before the text"
        assert found.text == text and list(found.starts[:around]) == [0] * around
        halves = "".join(found.between(at, at + 1) for at in range(len(ids)))
        assert halves == text == found.between(0, len(ids))
        shown = vocabulary.prompt_text(ids, None)
        assert shown.text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        cut = vocabulary.prompt_text(bare[2:], text)
        is_whole = "\ufffd" not in tokenizer.decode(bare[2:])
        assert not is_whole or list(cut.starts) == list(found.starts[around + 2 :])


def test_special_tokens_are_silent_but_for_those_that_a_parser_reads(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["harmony"]
    marks = detect(tokenizer, str(tokenizer.chat_template)).marks
    ids = tokenizer.encode("<|channel|>analysis<|message|>hm<|end|>", add_special_tokens=False)
    silent = text_of(run(ChoiceOutput(Vocabulary(tokenizer), request_of(), 0), ids))
    kept = text_of(run(ChoiceOutput(Vocabulary(tokenizer, marks), request_of(), 0), ids))
    assert silent == "analysishm"
    assert kept == "<|channel|>analysis<|message|>hm<|end|>"


def test_a_token_that_only_begins_a_mark_is_read(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["gemma4"]
    form = detect(tokenizer, str(tokenizer.chat_template))
    request = request_of()
    request.make_parser = lambda: form.parser("", None)
    ids = tokenizer.encode("<|channel>thought\nhm<channel|>yes", add_special_tokens=False)
    emissions = run(ChoiceOutput(Vocabulary(tokenizer, form.marks), request, 0), ids)
    assert text_of(emissions) == "yes"
    assert "".join(emission.text for emission in emissions if emission.kind == REASONING) == "hm"


@pytest.mark.parametrize("stop", ["STOP", "o wor", "🙂", "d!"])
def test_nothing_of_a_stop_string_is_sent_wherever_its_tokens_end(
    tokenizers: dict[str, Any], stop: str
) -> None:
    tokenizer = tokenizers["chatml"]
    ids = tokenizer.encode("Hello world! 🙂 STOP and more", add_special_tokens=False)
    output = ChoiceOutput(Vocabulary(tokenizer), request_of((stop, "never there")), 0)
    emissions = run(output, ids)
    assert text_of(emissions) == "Hello world! 🙂 STOP and more".split(stop, maxsplit=1)[0]
    finish = emissions[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop) == ("stop", stop)


def test_text_that_only_begins_a_stop_string_is_sent_in_the_end(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["chatml"]
    ids = tokenizer.encode("one two thr", add_special_tokens=False)
    emissions = run(ChoiceOutput(Vocabulary(tokenizer), request_of(("three",)), 0), ids)
    assert text_of(emissions) == "one two thr"
    assert emissions[-1].finish is not None
    assert emissions[-1].finish.reason == "length"


def test_an_end_token_counts_and_has_no_text(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["chatml"]
    [end, *_] = chat_tokenizers.end_ids("chatml", tokenizer)
    ids = [*tokenizer.encode("good bye", add_special_tokens=False), end]
    emissions = run(ChoiceOutput(Vocabulary(tokenizer), request_of(stop_ids=frozenset({end})), 0), ids)
    assert text_of(emissions) == "good bye"
    finish = emissions[-1].finish
    assert finish is not None
    assert (finish.reason, finish.tokens) == ("stop", len(ids))
    assert sum(emission.tokens for emission in emissions) == len(ids) - 1


def test_a_cut_character_is_replaced_at_the_limit_and_the_count_is_the_limit(
    tokenizers: dict[str, Any],
) -> None:
    tokenizer = tokenizers["chatml"]
    ids = tokenizer.encode("a🙂", add_special_tokens=False)
    assert len(ids) > 2
    emissions = run(ChoiceOutput(Vocabulary(tokenizer), request_of(limit=len(ids) - 1), 0), ids)
    assert text_of(emissions) == "a\ufffd"
    assert emissions[-1].finish is not None
    assert (emissions[-1].finish.reason, emissions[-1].finish.tokens) == ("length", len(ids) - 1)


def test_reasoning_is_counted_and_log_probabilities_stay_with_their_tokens(
    tokenizers: dict[str, Any],
) -> None:
    tokenizer = tokenizers["qwen3"]
    form = detect(tokenizer, str(tokenizer.chat_template))
    request = request_of()
    request.make_parser = lambda: form.parser("", None)
    output = ChoiceOutput(Vocabulary(tokenizer, form.marks), request, 0)
    ids = tokenizer.encode("<think>\nso so\n</think>\n\nyes", add_special_tokens=False)
    emissions: list[Emission] = []
    for token in ids:
        emissions += output.push(token, TokenLogprob(token, b"", -1.0))
    emissions += output.finish("length")
    kinds = [emission.kind for emission in emissions]
    assert kinds[-1] == FINISHED
    assert text_of(emissions) == "yes"
    assert "".join(emission.text for emission in emissions if emission.kind == REASONING) == "so so"
    finish = emissions[-1].finish
    assert finish is not None
    assert 0 < finish.reasoning_tokens < finish.tokens == len(ids)
    told = [each.id for emission in emissions for each in emission.logprobs or ()]
    assert told == ids


def test_text_that_waits_is_told_now_and_then(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["chatml"]
    stop = "never " * 40 + "!"
    ids = tokenizer.encode("never " * 39 + "mind", add_special_tokens=False)
    emissions = run(ChoiceOutput(Vocabulary(tokenizer), request_of((stop,)), 0), ids)
    held = [emission for emission in emissions if emission.kind == HELD]
    assert len(held) == len(ids) // HELD_TOKENS > 2
    assert not any(emission.text or emission.tokens for emission in held)
    assert text_of(emissions) == "never " * 39 + "mind"
    assert sum(emission.tokens for emission in emissions) == len(ids)


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("good bye", (), 0),
        ("a🙂", (), 1),
        ("<|endoftext|>ab<|endoftext|><|im_start|>", (), 0),
        ("one END two", ("END",), 0),
        ("END", ("END",), 0),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', (), 0),
        ('x<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', (), 0),
        ("<think>\nhm\n</think>\n\n", (), 0),
        ("<think>\nhm", (), 0),
        ("", (), 0),
    ],
)
@pytest.mark.parametrize("ends", [True, False])
def test_every_token_has_its_log_probability(
    tokenizers: dict[str, Any], text: str, stop: tuple[str, ...], cut: int, ends: bool
) -> None:
    tokenizer = tokenizers["qwen3"]
    form = detect(tokenizer, str(tokenizer.chat_template))
    end = chat_tokenizers.end_ids("qwen3", tokenizer)[0]
    request = request_of(stop, frozenset({end}) if ends else frozenset())
    tools = ToolUse([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    request.make_parser = lambda: form.parser("", tools)
    vocabulary = Vocabulary(tokenizer, form.marks)
    output = ChoiceOutput(vocabulary, request, 0)
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = [*ids[: len(ids) - cut], end]
    emissions: list[Emission] = []
    for token in ids:
        if output.ended is None:
            emissions += output.push(token, TokenLogprob(token, vocabulary.raw(token), -1.0))
    emissions += output.finish(output.ended or "length")
    assert emissions[-1].finish is not None
    told = [each for emission in emissions for each in emission.logprobs or ()]
    assert [each.id for each in told] == ids[: emissions[-1].finish.tokens]
    silent = {token for token in ids if token in vocabulary.silent}
    assert {each.id for each in told if each.is_silent} == silent & {each.id for each in told}
