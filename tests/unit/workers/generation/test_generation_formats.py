"""Formats of answers: reasoning, calls and text are told apart, however an answer arrives in pieces."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from frontend.generation.conversation import Conversation
from ipc.settings import Limits
from ipc.wire.messages import ToolUse
from ipc.wire.streams import CALL_CUT, CALLED, MOST_LEVELS, REASONING, TEXT
from tests.harness.called import calls_in
from tests.tiny import chat_tokenizers
from workers.generation.formats.table import NAMES, Format, detect
from workers.generation.request import OutputParser, Segment
from workers.generation.templates import ChatTemplate


def _function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = ToolUse(
    functions=[
        _function("get_weather", city={"type": "string"}, days={"type": "integer"}),
        _function("add", a={"type": "number"}, b={"type": "array"}, c={"type": ["string", "null"]}),
    ]
)
WEATHER = ("get_weather", {"city": "Paris", "days": 2})
ADD = ("add", {"a": 1.5, "b": [1, {"x": "}"}], "c": '</tool_call> "]}'})
TAGS = ("add", {"c": "</function></tool_call><tool_call|></function_calls><｜tool▁call▁end｜>"})
EMPTY = ("add", {})
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
_QWEN = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
_GEMMA_ADD = '<|tool_call>call:add{a:1.5,b:[1,{x:<|"|>}<|"|>}],c:<|"|></tool_call> "]}<|"|>}<tool_call|>'
_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n%s\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_HARMONY = (
    "<|channel|>analysis<|message|>Hm. <b> <|end|><|start|>assistant<|channel|>commentary<|message|>I look.\n<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>%s<|call|>"
    "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>%s<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Done <|."
)


def _json(call: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def _named(call: tuple[str, dict[str, Any]], arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _call(call: tuple[str, dict[str, Any]]) -> tuple[int, str]:
    return CALLED, f"{call[0]} {json.dumps(call[1], separators=(',', ':'), ensure_ascii=False)}"


def _qwen(call: tuple[str, dict[str, Any]]) -> str:
    return _QWEN % (call[0], _json(call))


QUOTED = '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}'
BROKEN_QUOTES = '{"name": "get_weather", "arguments": "{"city": "Paris", "days": 2}"}'
CASES: list[tuple[str, str, list[tuple[int, str]]]] = [
    ("qwen", "Hello <b> {x} </think>", [(TEXT, "Hello <b> {x} </think>")]),
    ("qwen", " \n plain", [(TEXT, " \n plain")]),
    (
        "qwen",
        f"<think>\nI <muse>\n\n</think>\n\nSure.\n\n{_qwen(WEATHER)}\n{_qwen(ADD)}\n",
        [(REASONING, "I <muse>"), (TEXT, "Sure.\n\n"), _call(WEATHER), _call(ADD)],
    ),
    ("qwen", f"{_qwen(WEATHER)} after <tool_", [_call(WEATHER), (TEXT, " after <tool_")]),
    ("qwen", "\n" + _qwen(("unknown", {})), [_call(("unknown", {}))]),
    ("qwen", f"<tool_call>{QUOTED}</tool_call>", [_call(WEATHER)]),
    ("qwen", f"<tool_call>{BROKEN_QUOTES}</tool_call>", [_call(WEATHER)]),
    ("qwen", '<tool_call>[{"name": "add", "arguments": null}]</tool_call>', [_call(EMPTY)]),
    ("qwen", f"a <tool_call> tag, {_qwen(EMPTY)}", [(TEXT, "a <tool_call> tag, "), _call(EMPTY)]),
    (
        "qwen",
        'x\n<tool_call>\n{"name": 5}\n</tool_call> y',
        [(TEXT, 'x\n<tool_call>\n{"name": 5}\n</tool_call> y')],
    ),
    (
        "qwen",
        ' <tool_call>{"name": "add", NaN}</tool_call>',
        [(TEXT, ' <tool_call>{"name": "add", NaN}</tool_call>')],
    ),
    ("qwen", f"<tool_call>{_named(WEATHER)}", [_call(WEATHER)]),
    ("qwen", '<tool_call>{"name": "add", "argu', [(TEXT, '<tool_call>{"name": "add", "argu')]),
    ("qwen", "<think>never ends <tool_call>", [(REASONING, "never ends <tool_call>")]),
    ("qwen", f"  {_named(WEATHER)}", [_call(WEATHER)]),
    (
        "qwen",
        f'<tool_call>{{"a": {"[" * 1200}</tool_call>',
        [(TEXT, f'<tool_call>{{"a": {"[" * 1200}</tool_call>')],
    ),
    ("qwen_xml", f"Sure\n{_XML}", [(TEXT, "Sure\n"), _call(WEATHER)]),
    (
        "qwen_xml",
        '<function=add>\n<parameter=a>\n1.5\n</parameter>\n<parameter=b>\n[1, {"x": "}"}]\n</parameter>\n'
        '<parameter=c>\n</tool_call> "]}\n</parameter>\n</function>\n</tool_call>\n',
        [_call(ADD)],
    ),
    ("qwen_xml", "<function=add>\n</function> x <function", [_call(EMPTY), (TEXT, " x <function")]),
    (
        "qwen_xml",
        f"a<tool_call>\n<function=add>\n{_json(ADD)}\n</function>\n</tool_call>b",
        [(TEXT, "a"), _call(ADD), (TEXT, "b")],
    ),
    ("qwen_xml", f"<function=add>{_json(TAGS)}</function> b", [_call(TAGS), (TEXT, " b")]),
    ("gemma4", f"<|tool_call>call:add{_json(TAGS)}<tool_call|>b", [_call(TAGS), (TEXT, "b")]),
    (
        "deepseek",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{_json(TAGS)}<｜tool▁call▁end｜>b",
        [_call(TAGS), (TEXT, "b")],
    ),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>",
        [(TEXT, "<｜tool▁call▁begin｜>add<｜tool▁sep｜>")],
    ),
    (
        "python",
        f"<function_calls>[{_named(TAGS)}, {_named(WEATHER)}]</function_calls>b",
        [_call(TAGS), _call(WEATHER), (TEXT, "b")],
    ),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": "x', [(CALL_CUT, 'add {"a":"x')]),
    ("qwen_xml", "<tool_call>none</tool_call>", [(TEXT, "<tool_call>none")]),
    ("llama", f"<|python_tag|>{_named(WEATHER, 'parameters')}", [_call(WEATHER)]),
    (
        "llama",
        f"{_named(WEATHER, 'parameters')}; {_named(ADD, 'parameters')} so",
        [_call(WEATHER), _call(ADD), (TEXT, " so")],
    ),
    ("llama", f"Look: {_named(WEATHER)}", [(TEXT, f"Look: {_named(WEATHER)}")]),
    ("llama", '<|python_tag|>print("x")', [(TEXT, '<|python_tag|>print("x")')]),
    ("llama", '{"title": "a", "name": "add"}', [(TEXT, '{"title": "a", "name": "add"}')]),
    ("llama", '{"name": "Bob", "arguments": {}}', [(TEXT, '{"name": "Bob", "arguments": {}}')]),
    ("llama", '\n{"name": "add"} x', [(TEXT, '\n{"name": "add"} x')]),
    ("json", f"[{_named(WEATHER)}, {_named(ADD)}]", [_call(WEATHER), _call(ADD)]),
    ("json", "{ 5 }", [(TEXT, "{ 5 }")]),
    ("json", "[1, 2]", [(TEXT, "[1, 2]")]),
    ("json", '{"type": "function", "function": ' + _named(ADD) + "}", [_call(ADD)]),
    (
        "mistral",
        f"I call[TOOL_CALLS] [{_named(WEATHER)}, {_named(ADD)}]",
        [(TEXT, "I call"), _call(WEATHER), _call(ADD)],
    ),
    (
        "mistral",
        f"[TOOL_CALLS]get_weather{_json(WEATHER)}[TOOL_CALLS]add[CALL_ID]x1[ARGS]{_json(ADD)} end",
        [_call(WEATHER), _call(ADD), (TEXT, " end")],
    ),
    ("mistral", "[TOOL_CALLS]no call", [(TEXT, "[TOOL_CALLS]no call")]),
    ("mistral", f"[TOOL_CALLS]{'n' * 400}", [(TEXT, f"[TOOL_CALLS]{'n' * 400}")]),
    ("mistral", "[TOOL_CALLS]add[1, 2] x", [(TEXT, "[TOOL_CALLS]add[1, 2] x")]),
    ("mistral", "[TOOL_CALLS]add[AR", [(TEXT, "[TOOL_CALLS]add[AR")]),
    ("deepseek", "Hm\n" + _V3 % (_json(WEATHER), _json(ADD)), [(TEXT, "Hm\n"), _call(WEATHER), _call(ADD)]),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>",
        [(TEXT, "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>")],
    ),
    ("gemma4", f"Yes. {_GEMMA_ADD} ok", [(TEXT, "Yes. "), _call(ADD), (TEXT, " ok")]),
    (
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
        [(REASONING, "hm"), _call(WEATHER)],
    ),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>", [(TEXT, "<|tool_call>call:add{a:}<tool_call|>")]),
    ("gemma", 'So\n```tool_code\nget_weather("Paris", days=2)\n```', [(TEXT, "So\n"), _call(WEATHER)]),
    ("gemma", "```tool_code\nprint(add())\n```\nb", [_call(EMPTY), (TEXT, "\nb")]),
    ("gemma", "```tool_code\nimport os\n```", [(TEXT, "```tool_code\nimport os\n```")]),
    ("gemma", "```python\nx\n```", [(TEXT, "```python\nx\n```")]),
    ("phi4", f"<|tool_call|>[{_named(WEATHER)}]<|/tool_call|>", [_call(WEATHER)]),
    ("granite", f"<|tool_call|>[{_named(WEATHER)}] x", [_call(WEATHER), (TEXT, " x")]),
    (
        "python",
        f"<function_calls>get_weather(city='Paris', days=2)\nadd(**{ {} })</function_calls>",
        [(TEXT, "<function_calls>get_weather(city='Paris', days=2)\nadd(**{})</function_calls>")],
    ),
    (
        "python",
        "<function_calls>[add(), get_weather('Paris', 2)]</function_calls>",
        [_call(EMPTY), _call(WEATHER)],
    ),
    (
        "harmony",
        _HARMONY % (_json(WEATHER), _json(ADD)),
        [(REASONING, "Hm. <b> "), (TEXT, "I look.\n"), _call(WEATHER), _call(ADD), (TEXT, "Done <|.")],
    ),
    ("harmony", " to=functions.add<|channel|>commentary<|message|>", [_call(EMPTY)]),
    ("harmony", "plain <text>", [(TEXT, "plain <text>")]),
    ("harmony", "as", [(TEXT, "as")]),
    ("harmony", "assistant" + "x" * 400, [(TEXT, "assistant" + "x" * 400)]),
    ("harmony", "<|channel|>final", []),
    (
        "harmony",
        "<|channel|>commentary to=functions.add<|message|>no",
        [(TEXT, "<|channel|>commentary to=functions.add<|message|>no")],
    ),
    (
        "template",
        f"<think>\nI\n</think>Sure.{_qwen(WEATHER)} b{_qwen(EMPTY)}",
        [(REASONING, "\nI\n"), (TEXT, "Sure."), _call(WEATHER), (TEXT, " b"), _call(EMPTY)],
    ),
    (
        "template",
        f"Say <tool_call>no json</tool_call> and {_qwen(EMPTY)}.",
        [(TEXT, "Say <tool_call>no json</tool_call> and "), _call(EMPTY), (TEXT, ".")],
    ),
    ("template", "x<tool_call>{", [(TEXT, "x<tool_call>{")]),
    ("none", f"<think>a</think>{_qwen(WEATHER)}", [(REASONING, "a"), (TEXT, _qwen(WEATHER))]),
]


def _format(name: str, reasoning: str = "") -> Format:
    kind = {"gemma4": "gemma4", "harmony": "harmony", "mistral": "mistral"}.get(name, "qwen3")
    tokenizer = chat_tokenizers.build(kind)
    if name == "template":
        tokenizer.response_template = TEMPLATE
    return detect(tokenizer, chat_tokenizers.template(kind), name, reasoning)


FORMATS = {name: _format(name) for name in NAMES}


def _merged(segments: list[Segment]) -> list[tuple[int, str]]:
    """Segments as pairs, neighbours of one kind joined, and the parts of a call; CALL_CUT for one that breaks off."""
    calls = iter(calls_in(segments))
    pairs = []
    for segment in segments:
        if segment.call is not None:
            call = next(calls)
            pairs.append((CALLED if call.is_whole else CALL_CUT, f"{call.name} {call.arguments}"))
        elif segment.kind in (TEXT, REASONING):
            pairs.append((segment.kind, segment.text))
    return [
        (kind, text)
        for kind, group in itertools.groupby(pairs, key=lambda pair: pair[0])
        for text in (
            ["".join(pair[1] for pair in group)] if kind in (TEXT, REASONING) else [pair[1] for pair in group]
        )
    ]


def _parsed(parser: OutputParser, pieces: list[str]) -> list[tuple[int, str]]:
    segments = [segment for piece in pieces for segment in parser.feed(piece, 1)]
    return _merged([*segments, *parser.finish(False)])


@pytest.mark.sample(20)
@pytest.mark.parametrize(("name", "answer", "expected"), CASES)
def test_answers_are_told_apart_wherever_they_are_cut(
    name: str, answer: str, expected: list[tuple[int, str]]
) -> None:
    def parse(pieces: list[str]) -> list[tuple[int, str]]:
        return _parsed(FORMATS[name].parser("", TOOLS), pieces)

    assert parse([answer]) == expected
    assert parse(list(answer)) == expected
    for cut in range(1, min(len(answer), 500)):
        assert parse([answer[:cut], answer[cut:]]) == expected
    source = random.Random(answer)
    for _ in range(20):
        cuts = sorted(source.sample(range(len(answer) + 1), min(5, len(answer))))
        assert parse([answer[a:b] for a, b in itertools.pairwise([0, *cuts, len(answer)])]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_no_output_makes_a_parser_raise_or_depends_on_cuts(name: str) -> None:
    form = FORMATS[name]
    parts = [
        *form.marks,
        "{",
        "}",
        '"name"',
        ":",
        '"arguments"',
        "[",
        "]",
        ",",
        '"',
        "\\",
        "add",
        " ",
        "\n",
        "x",
        "to=",
        "call:",
    ]
    source = random.Random(name)
    for _ in range(150):
        answer = "".join(source.choices(parts, k=source.randrange(1, 25)))
        whole = _parsed(form.parser("", TOOLS), [answer])
        assert _parsed(form.parser("", TOOLS), list(answer)) == whole
        if name == "json" and "think>" not in answer and not any(kind == CALLED for kind, _ in whole):
            assert "".join(text for _, text in whole) == answer


@pytest.mark.parametrize("name", ["qwen", "template"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (r'{"a": "\ud83d", "\udc00": "\ud83d\ude00"}', '{"a":"\ufffd","\ufffd":"\U0001f600"}'),
        ('{"a": 1e999}', ('{"a":', "1e999}")),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", ('{"a":' + "[" * 47, "[" * 153 + "]" * 200 + "}")),
        ('{"a": ' + "1" * 300 + "}", '{"a":' + "1" * 300 + "}"),
        ('{"a": ' + "1" * 400 + "}", ('{"a":', "1" * 400 + "}")),
        ('{"a": ' * MOST_LEVELS + "1" + "}" * MOST_LEVELS, '{"a":' * MOST_LEVELS + "1" + "}" * MOST_LEVELS),
        (
            '{"a": ' * (MOST_LEVELS + 1) + "1" + "}" * (MOST_LEVELS + 1),
            ('{"a":' * MOST_LEVELS, '{"a": 1' + "}" * (MOST_LEVELS + 1)),
        ),
        (r'{"\u0000a": "\\u0000\u0000\u0000"}', '{"\ufffda":"' + r"\\u0000" + '\ufffd\ufffd"}'),
    ],
)
def test_arguments_are_json_that_a_client_can_send_back(
    name: str, arguments: str, told: str | tuple[str, str]
) -> None:
    answer = _QWEN % ("add", arguments)
    for pieces in ([answer], list(answer)):
        parsed = _parsed(FORMATS[name].parser("", TOOLS), pieces)
        if isinstance(told, str):
            assert parsed == [(CALLED, f"add {told}")]
        else:
            assert parsed == [(CALL_CUT, f"add {told[0]}"), (TEXT, told[1] + "}\n</tool_call>")]
    if isinstance(told, str):
        for returned in (told, json.loads(told)):
            Conversation(Limits()).call("call_1", "add", returned, "messages[1]")


@pytest.mark.parametrize(
    ("name", "again"), [("qwen_xml", "<function=a><parameter=b>"), ("qwen", '{"arguments":"{}')]
)
def test_a_mark_that_comes_again_and_again_is_read_in_one_pass(name: str, again: str) -> None:
    """A search behind each of the marks would hold the device for minutes, and all streams with it."""
    begin = "<function=a>" if name == "qwen_xml" else "{"
    body = f"<tool_call>{begin}{again * 100_000}"
    parser = FORMATS[name].parser("", TOOLS)
    assert _merged([*parser.feed(f"{body}</tool_call>", 1), *parser.finish(False)])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "template"])
def test_text_before_a_possible_call_is_not_held_back(name: str) -> None:
    parser = FORMATS[name].parser("", TOOLS)
    if name == "harmony":
        parser.feed("<|channel|>final<|message|>", 1)
    said = "".join(segment.text for word in ("Plain ", "words ", "pass") for segment in parser.feed(word, 1))
    assert said == "Plain words pass"


@pytest.mark.parametrize(
    ("name", "text", "begin"),
    [("harmony", _HARMONY % (_json(WEATHER), _json(ADD)), "call_"), ("qwen", _qwen(ADD), "call-")],
)
def test_ids_of_harmonys_calls_begin_as_those_of_openai(name: str, text: str, begin: str) -> None:
    parser = FORMATS[name].parser("", TOOLS)
    calls = calls_in([*parser.feed(text, 1), *parser.finish(False)])
    assert calls and {call.prefix for call in calls} == {begin}


@pytest.mark.parametrize(("name", "answer", "expected"), CASES)
def test_without_tools_calls_stay_text(name: str, answer: str, expected: list[tuple[int, str]]) -> None:
    parsed = _parsed(FORMATS[name].parser("", None), list(answer))
    assert not any(kind == CALLED for kind, _ in parsed)
    for kind, _ in expected:
        if kind == CALLED and name not in ("template", "harmony"):
            said = "".join(text for kind, text in parsed if kind == TEXT)
            assert answer.endswith(said) and "".join(said.split())
    plain = _parsed(FORMATS[name].parser("", None, splits=False), list(answer))
    assert plain == [(TEXT, answer)]


def test_a_prompt_that_opens_reasoning_is_continued() -> None:
    for prompt in ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>"):
        for name in ("qwen", "template"):
            parsed = _parsed(FORMATS[name].parser(prompt, TOOLS), list("hm</think>yes"))
            assert parsed == [(REASONING, "hm"), (TEXT, "yes")]
    closed = FORMATS["qwen"].parser("<|im_start|>assistant\n<think>\n\n</think>\n\n", TOOLS)
    assert _parsed(closed, ["yes"]) == [(TEXT, "yes")]


def test_all_tokens_are_counted_once() -> None:
    answer = f"<think>\nhm\n</think>\n\nSure.{_qwen(WEATHER)}{_qwen(ADD)} end"
    parser = FORMATS["qwen"].parser("", TOOLS)
    segments = [segment for piece in answer for segment in parser.feed(piece, 1)] + parser.finish(False)
    assert sum(segment.tokens for segment in segments) == len(answer)


@pytest.mark.parametrize(
    ("kind", "name", "reasoning"),
    [
        ("chatml", "json", None),
        ("qwen3", "qwen", "<think>"),
        ("qwen3_coder", "qwen_xml", "<think>"),
        ("llama3", "llama", None),
        ("mistral", "mistral", None),
        ("mistral3", "mistral", "[THINK]"),
        ("deepseek", "deepseek", "<think>"),
        ("gemma", "gemma", None),
        ("gemma4", "gemma4", "<|channel>thought"),
        ("harmony", "harmony", None),
        ("phi3", "json", None),
    ],
)
def test_formats_are_detected_by_facts_of_the_template(kind: str, name: str, reasoning: str | None) -> None:
    tokenizer = chat_tokenizers.build(kind)
    form = detect(tokenizer, ChatTemplate(tokenizer).text)
    assert form.name == name
    assert (form.layout.reasoning.opened if form.layout and form.layout.reasoning else None) == reasoning


def test_options_choose_a_format_and_wrong_ones_are_refused() -> None:
    tokenizer = chat_tokenizers.build("chatml")
    assert detect(tokenizer, "", "qwen", "think").marks[:1] == ("<tool_call>",)
    assert detect(chat_tokenizers.build("qwen3"), "", "", "none").layout.reasoning is None  # type: ignore[union-attr]
    for options in (("qwenn", ""), ("", "thinking"), ("template", "")):
        with pytest.raises(ValueError, match=r"tool_format|reasoning"):
            detect(tokenizer, "", *options)
