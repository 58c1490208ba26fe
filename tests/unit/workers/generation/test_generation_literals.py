"""Text that a grammar asks for is content, also where its letters are those of a control token or of a mark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ipc.wire.messages import GenerateCall, Grammar, ToolUse
from ipc.wire.streams import CALL_ENDED, CALLED, REASONING, TEXT
from tests.harness.guided_model import Model
from tests.tiny import chat_tokenizers
from workers.generation import grammar as grammar_text

OPEN = "<|im_start|>assistant\n<think>\n"
MARKS = ("<think>", "</think>", "[THINK]", "<|channel>thought", "<|im_end|>", "</tool_call>", "[TOOL_CALLS]")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


@pytest.fixture(scope="module")
def known() -> Iterator[Any]:
    """Models by kind, each made once."""
    made: dict[str, Model] = {}

    def model(kind: str) -> Model:
        if kind not in made:
            tokenizer = chat_tokenizers.build("qwen3" if kind == "template" else kind)
            if kind == "template":
                tokenizer.response_template = TEMPLATE
            made[kind] = Model("qwen3" if kind == "template" else kind, tokenizer=tokenizer)
        return made[kind]

    yield model
    for one in made.values():
        one.grammars.close()


KINDS = [*chat_tokenizers.KINDS, "template"]


def _literals(model: Model) -> list[str]:
    added = [token.content for token in model.tokenizer.added_tokens_decoder.values()]
    return sorted({*added, *MARKS, *model.form.marks, CALL})


def _function(values: list[str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": values}, "b": {"const": values[0]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_grammar_asks_for_is_content(known: Any, kind: str) -> None:
    model = known(kind)
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for seed, text in enumerate(_literals(model)):
        quoted = re.escape(text).replace("/", "\\/")
        grammars = {
            "regex at the begin": Grammar("regex", f"{quoted}[a-c]{{3}}{quoted}"),
            "regex within": Grammar("regex", f"x{quoted}y"),
            "lark": Grammar("lark", f'start: "a" | B\nB: {json.dumps(text)} /[0-9]/'),
            "json_schema": Grammar("json_schema", json.dumps({"enum": [text, {"k": [text]}]})),
        }
        several = kind in ("qwen3", "harmony")
        for number, (name, grammar) in enumerate(grammars.items()):
            for tools in (None, ToolUse([function])):
                if not several and (seed + number + (tools is None)) % 5:
                    continue
                answer = model.answer(GenerateCall(grammar=grammar, tools=tools), seed)
                assert answer.ended, (name, text)
                if tools is not None and answer.calls:
                    continue
                said = answer.said(TEXT)
                assert not any(each.kind == CALLED for each in answer.segments), (name, text)
                if name == "json_schema":
                    assert json.loads(said) in (text, {"k": [text]}), (said, text)
                elif name == "lark":
                    assert said == "a" or (said[:-1] == text and said[-1].isdigit()), (said, text)
                else:
                    assert re.fullmatch(grammar.value, said), (name, said, text)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
def test_no_control_token_writes_what_a_grammar_asks_for(known: Any, kind: str) -> None:
    model = known(kind)
    added = set(model.tokenizer.added_tokens_decoder)
    for text in _literals(model):
        call = GenerateCall(grammar=Grammar("regex", re.escape(text)), splits=False)
        guide, taken = model.guide(call, ""), list[int]()
        forced = guide.forced()
        while forced and not guide.is_stopped:
            taken += forced
            assert all(guide.consume(token) for token in forced)
            forced = [] if guide.is_stopped else guide.forced()
        assert taken and not added & set(taken), text
        assert not guide.error


@pytest.mark.parametrize("kind", ["qwen3", "deepseek", "template", "mistral3", "gemma4"])
def test_behind_reasoning_all_is_content(known: Any, kind: str) -> None:
    model = known(kind)
    opened = model.form.reasoning.opened
    for seed, text in enumerate((opened, CALL, "<think>a</think>", " <x>", *model.form.marks)):
        grammar = Grammar("regex", f"{re.escape(text)}[a-c]{{3}}".replace("/", "\\/"))
        for prompt in (
            f"{model.prompt(None)}{opened}\n",
            f"{model.prompt(None)}{opened}x{model.form.reasoning.closed}",
        ):
            answer = model.answer(GenerateCall(grammar=grammar), seed, prompt, most=3000)
            assert answer.ended
            assert re.fullmatch(grammar.value, answer.said(TEXT))
            assert bool(answer.said(REASONING)) <= prompt.endswith("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_behind_the_begin_of_an_answer_all_is_content(known: Any, kind: str) -> None:
    model = known(kind)
    for seed, text in enumerate(("<think>a</think>", *model.form.marks)):
        grammar = Grammar("regex", f"{re.escape(text)}[a-c]{{3}}".replace("/", "\\/"))
        answer = model.answer(GenerateCall(grammar=grammar), seed, "So: ", said="So: ")
        assert answer.ended
        assert re.fullmatch(grammar.value, answer.said(TEXT))


@pytest.mark.sample
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "phi3"])
@pytest.mark.parametrize("choice", ["required", "named", "auto"])
def test_arguments_may_hold_the_letters_of_every_mark(known: Any, kind: str, choice: str) -> None:
    model = known(kind)
    texts = [text for text in _literals(model) if text != CALL]
    called = 0
    for seed, text in enumerate(texts):
        if kind != "qwen3" and (seed + len(choice)) % 3:
            continue
        values = [text, f'q"{text}\\', f"{text}{text}\n"]
        use = ToolUse([_function(values)], choice, name="f" if choice == "named" else "", strict=["f"])
        answer = model.answer(GenerateCall(tools=use), seed, most=3000)
        for name, arguments in answer.calls:
            called += 1
            assert name == "f"
            assert arguments["a"] in values
            assert arguments["b"] == text
        if choice != "auto":
            assert answer.calls and answer.ended
            assert answer.segments[-1].kind == CALL_ENDED
    assert called or choice == "auto"


def test_clients_may_name_control_tokens_in_lark(known: Any) -> None:
    model = known("qwen3")
    token = model.tokenizer.convert_tokens_to_ids("<tool_response>")
    lark = 'start: "<tool_response>" /<\\/?b>/ <tool_response> "x" // <tool_response>\n'
    written = grammar_text.with_ids(lark, {"<tool_response>": token})
    assert written == lark.replace(" <tool_response> ", f" <[{token}]> ", 1)
    guide = model.guide(
        GenerateCall(grammar=Grammar("lark", 'start: "a" <tool_response> "b"'), splits=False), ""
    )
    assert token in guide.forced()


def test_pieces_of_a_vocabulary_that_are_control_tokens_are_made_by_no_merge() -> None:
    vocabulary = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "a": 5}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["<", "s"], ["<s", ">"]], "unk_token": "<s>"}
    text = json.dumps({"added_tokens": [{"id": 4, "content": "<s>", "special": True}], "model": model})
    hidden = json.loads(grammar_text.without_marks(text, {"<s>"}))
    [token] = hidden["added_tokens"]
    assert hidden["model"]["vocab"] == {"<": 0, "s": 1, ">": 2, "<s": 3, token["content"]: 4, "a": 5}
    assert hidden["model"]["merges"] == [["<", "s"]]
    assert hidden["model"]["unk_token"] == token["content"] != "<s>"
    unigram = {"type": "Unigram", "vocab": [["<s>", 0.0], ["a", -1.25]], "unk_id": 0}
    hidden = json.loads(
        grammar_text.without_marks(json.dumps({"added_tokens": [token], "model": unigram}), {"<s>"})
    )
    assert hidden["model"]["vocab"] == [[token["content"], 0.0], ["a", -1.25]]
