"""Calls of answers that end early, and what ends an answer: cut lists, raw control characters, unwanted calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from ipc.wire.messages import GenerateCall, ToolUse
from ipc.wire.streams import CALLED, FINISHED, TEXT
from tests.harness.called import calls_in
from tests.tiny import chat_tokenizers
from workers.generation.formats.table import NAMES, Format, detect
from workers.generation.request import Emission, GenerationRequest, OutputParser, Segment
from workers.generation.text import ChoiceOutput, Vocabulary

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
_F, _G = '{"name": "f", "arguments": {"a": "x"}}', '{"name": "g", "arguments": {}}'
_TAGGED = "<tool_call>\n%s\n</tool_call>"
_XML_F, _XML_G = "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", "<function=g>\n</function>"
_V3 = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
_HARMONY = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s"
SEVERAL: list[tuple[str, list[str]]] = [
    ("json", [_F, f"\n{_G}\n", _F]),
    ("json", [f"[{_F}", f", {_G}", f", {_F}]"]),
    ("qwen", [_TAGGED % _F, "\n" + _TAGGED % _G, _TAGGED % _F]),
    ("qwen", [f"<tool_call>[{_F}", f", {_G}", f", {_F}]</tool_call>"]),
    ("qwen_xml", [f"<tool_call>\n{_XML_F}", f"\n{_XML_G}", f"{_XML_F}\n</tool_call>"]),
    ("qwen_xml", [_XML_F, _XML_G, _XML_F]),
    ("llama", [_F, f"; {_G}", f"; {_F}"]),
    ("llama", [f"<|python_tag|>[{_F}", f",{_G}", f",{_F}]"]),
    ("mistral", [f"[TOOL_CALLS] [{_F}", f", {_G}", f", {_F}]"]),
    ("mistral", ['[TOOL_CALLS]f[ARGS]{"a": "x"}', "[TOOL_CALLS]g{}", '[TOOL_CALLS]f{"a": "x"}']),
    (
        "deepseek",
        ["<｜tool▁calls▁begin｜>" + _V3 % ("f", '{"a": "x"}'), _V3 % ("g", "{}"), _V3 % ("f", '{"a": "x"}')],
    ),
    (
        "gemma4",
        [f"<|tool_call>call:{call}<tool_call|>" for call in ('f{a:<|"|>x<|"|>}', "g{}", 'f{a:<|"|>x<|"|>}')],
    ),
    ("gemma", ['```tool_code\nf(a="x")', "\nprint(g())", "\nf(a='x')\n```"]),
    ("gemma", ["```tool_code\n[f(a='x')", ", g()", ", f(a='x')]\n```"]),
    ("phi4", [f"<|tool_call|>[{_F}", f", {_G}", f", {_F}]<|/tool_call|>"]),
    ("granite", [f"<|tool_call|>[{_F}", f", {_G}", f", {_F}]"]),
    ("python", ["<function_calls>[f(a='x')", ", g()", ", f(a='x')]</function_calls>"]),
    ("python", [f"<function_calls>[{_F}", f", {_G}", f", {_F}]</function_calls>"]),
    (
        "harmony",
        [
            _HARMONY % ("f", '{"a": "x"}<|call|>'),
            "<|start|>assistant" + _HARMONY % ("g", "{}<|end|>"),
            "<|start|>assistant" + _HARMONY % ("f", '{"a": "x"}<|call|>'),
        ],
    ),
    ("template", [_TAGGED % _F, _TAGGED % _G, _TAGGED % _F]),
]
"""Three calls in the notations of a format, of which the third repeats the first."""
CALLS = [("f", {"a": "x"}), ("g", {}), ("f", {"a": "x"})]
RAW = [
    ("json", '{"name": "f", "arguments": {"a": "%s"}}'),
    ("qwen", '<tool_call>\n{"name": "f", "arguments": {"a": "%s"}}\n</tool_call>'),
    ("qwen", '[{"name": "f", "arguments": {"a": "%s"}}]'),
    ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"),
    ("qwen_xml", '<function=f>{"a": "%s"}</function>'),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": "%s"}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "%s"}}]'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "%s"}'),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "%s"}<｜tool▁call▁end｜>'),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "%s"}\n```<｜tool▁call▁end｜>',
    ),
    ("gemma4", '<|tool_call>call:f{a:<|"|>%s<|"|>}<tool_call|>'),
    ("gemma4", '<|tool_call>call:f{"a": "%s"}<tool_call|>'),
    ("gemma", '```tool_code\nf(a="%s")\n```'),
    ("phi4", '<|tool_call|>[{"name": "f", "arguments": {"a": "%s"}}]<|/tool_call|>'),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": "%s"}}]'),
    ("python", "<function_calls>[f(a='%s')]</function_calls>"),
    ("python", '<function_calls>[{"name": "f", "arguments": {"a": "%s"}}]</function_calls>'),
    ("harmony", _HARMONY % ("f", '{"a": "%s"}<|call|>')),
    ("template", _TAGGED % '{"name": "f", "arguments": {"a": "%s"}}'),
]
FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    for name in "fg"
]


def _built(name: str) -> tuple[Any, Format]:
    tokenizer = chat_tokenizers.build({"gemma4": "gemma4", "harmony": "harmony"}.get(name, "qwen3"))
    if name == "template":
        tokenizer.response_template = TEMPLATE
    return tokenizer, detect(tokenizer, str(tokenizer.chat_template), name)


BUILT = {name: _built(name) for name in NAMES if name != "none"}


def _calls(found: Iterable[Segment | Emission]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls_in(found) if call.is_whole]


def _segments(parser: OutputParser, text: str, cut: bool) -> list[Segment]:
    return [segment for letter in text for segment in parser.feed(letter, 1)] + parser.finish(cut)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "parts"), SEVERAL)
def test_an_answer_that_is_cut_keeps_its_complete_calls(name: str, parts: list[str]) -> None:
    form = BUILT[name][1]
    tools, whole = ToolUse(FUNCTIONS), "".join(parts)
    for end in range(1, len(whole) + 1):
        text = whole[:end]
        found = _calls(_segments(form.parser("", tools), text, cut=True))
        at_once = form.parser("", tools)
        assert _calls([*at_once.feed(text, 1), *at_once.finish(cut=True)]) == found
        assert found == CALLS[: len(found)]
        reached = sum(end >= len("".join(parts[: count + 1])) for count in range(len(parts)))
        # NOTE: a closing mark may be missing, so that the last call can be whole some letters before its end.
        assert len(found) in (reached, reached + 1), text


@pytest.mark.parametrize("name", BUILT)
def test_no_call_is_told_whose_arguments_were_cut(name: str) -> None:
    form = BUILT[name][1]
    for kind, parts in SEVERAL:
        if kind != name:
            continue
        before = parts[0].find("x")
        for end in range(1, before + 1):
            assert not _calls(_segments(form.parser("", ToolUse(FUNCTIONS)), parts[0][:end], cut=True))


@pytest.mark.parametrize(("name", "answer"), RAW)
def test_raw_control_characters_in_arguments_are_read(name: str, answer: str) -> None:
    form = BUILT[name][1]
    for raw in ("one\ntwo", "a\tb", "\r\n", "a\x01\x1f\x0bb", 'q \\" and\n\\\\', "</tool_call>\n"):
        if form.name in ("gemma", "gemma4", "qwen_xml") and ("\\" in raw or "</" in raw):
            continue
        text = answer % raw
        expected = raw.replace('\\"', '"').replace("\\\\", "\\")
        segments = _segments(form.parser("", ToolUse(FUNCTIONS)), text, cut=False)
        assert _calls(segments) == [("f", {"a": expected})]
        assert not "".join(segment.text for segment in segments if segment.kind == TEXT).strip("; \n")


def _answered(name: str, text: str, tools: ToolUse, limit: int = 5000) -> list[Emission]:
    """What a choice becomes whose model writes a text."""
    tokenizer, form = BUILT[name]
    request = GenerationRequest("key", [1], GenerateCall(tools=tools), limit, frozenset())
    request.make_parser = partial(form.parser, "", tools)
    output = ChoiceOutput(Vocabulary(tokenizer, form.marks), request, 0)
    found: list[Emission] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        found += output.push(token, None)
        if output.ended is not None:
            break
    return found + output.finish(output.ended or "stop")


@pytest.mark.parametrize(("name", "parts"), SEVERAL)
def test_a_forced_answer_ends_before_a_call_that_repeats_another(name: str, parts: list[str]) -> None:
    answer = "".join(parts) + "".join(parts[1:])
    for choice, expected in (("required", CALLS[:2]), ("auto", CALLS)):
        found = _answered(
            name, answer if choice == "required" else "".join(parts), ToolUse(FUNCTIONS, choice)
        )
        assert _calls(found) == expected
        assert not "".join(each.text for each in found if each.kind == TEXT).strip()
        assert found[-1].kind == FINISHED
        assert found[-1].finish is not None
        assert found[-1].finish.reason == "tool_calls"


@pytest.mark.parametrize(("name", "parts"), SEVERAL)
def test_an_answer_ends_before_a_second_call_where_one_is_allowed(name: str, parts: list[str]) -> None:
    uses = (
        ToolUse(FUNCTIONS, parallel=False),
        ToolUse(FUNCTIONS, "required", parallel=False),
        ToolUse(FUNCTIONS, "named", name="f"),
    )
    for tools in uses:
        found = _answered(name, "".join(parts), tools)
        assert _calls(found) == CALLS[:1]
        assert not "".join(each.text for each in found if each.kind == TEXT).strip()
        assert found[-1].finish is not None
        assert found[-1].finish.reason == "tool_calls"


def test_the_repeated_call_ends_the_answer_and_not_its_last_token() -> None:
    text = "".join(_TAGGED % _F for _ in range(28))
    found = _answered("qwen", text, ToolUse(FUNCTIONS, "required"))
    assert found[-1].finish is not None
    tokens = len(BUILT["qwen"][0].encode(_TAGGED % _F, add_special_tokens=False))
    assert tokens < found[-1].finish.tokens <= 2 * tokens
    assert [each.kind for each in found if each.kind in (CALLED, TEXT)] == [CALLED]


def test_a_cut_answer_of_any_length_says_so() -> None:
    found = _answered("mistral", f"[TOOL_CALLS] [{_F}, {_G}]", ToolUse(FUNCTIONS), limit=40)
    assert found[-1].finish is not None
    assert found[-1].finish.reason == "length"
    assert _calls(found) == CALLS[:1]
