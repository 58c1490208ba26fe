"""Calls that leave as they are written: the pieces add up to the same call, however the text is cut."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from ipc.wire.messages import ToolUse
from ipc.wire.streams import (
    ARGUMENTS,
    CALL_CUT,
    CALL_ENDED,
    CALLED,
    MOST_LEVELS,
    REASONING,
    TEXT,
    CalledFunction,
)
from tests.harness.called import calls_in
from tests.unit.workers.generation.test_generation_calls import BUILT
from workers.generation.formats.bodies import compact
from workers.generation.formats.written import CompactObject
from workers.generation.request import Call, OutputParser, Segment
from workers.generation.text import CalledFunctions

_STRINGS = (
    "",
    "x",
    'q " \\ /',
    "line\nbreak\ttab",
    "\u2028é你🙂",
    "</tool_call>",
    "}]{[",
    "\x01\x1f",
    "\\u0041",
    "é" * 40,
)
_NUMBERS = (0, -1, 7, 10**30, -(10**300), 1.5, -0.0, 1e22, 1e-7, 123456789.123456789, True, False, None)
_PROPERTIES = {name: {} for name in ("a", "b", "c", "s")}
TOOLS = ToolUse(
    [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": _PROPERTIES}},
        }
        for name in ("f", "lookup.it")
    ]
)
_PLAIN_TAG = "<tool_call>\n%s\n</tool_call>"
WRAPPED: dict[str, list[str]] = {
    "json": [
        '{"name": "%s", "arguments": %s}',
        '{"type": "function", "function": {"name": "%s", "parameters": %s}}',
    ],
    "qwen": [
        '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
        '[{"name": "%s", "arguments": %s}]',
    ],
    "qwen_xml": ["<tool_call>\n<function=%s>\n%s\n</function>\n</tool_call>", "<function=%s>%s</function>"],
    "llama": ['<|python_tag|>{"name": "%s", "parameters": %s}', '{"name": "%s", "parameters": %s}'],
    "mistral": [
        '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]',
        "[TOOL_CALLS]%s[ARGS]%s",
        "[TOOL_CALLS]%s%s",
    ],
    "deepseek": [
        "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>",
    ],
    "gemma4": ["<|tool_call>call:%s%s<tool_call|>"],
    "phi4": ['<|tool_call|>[{"name": "%s", "arguments": %s}]<|/tool_call|>'],
    "granite": ['<|tool_call|>[{"id": "1", "name": "%s", "arguments": %s}]'],
    "python": ['<function_calls>[{"name": "%s", "arguments": %s}]</function_calls>'],
    "harmony": ["<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s<|call|>"],
    "template": ['<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'],
}
"""Answers of each format with places for a name and an object in JSON."""
NOTATIONS = [(name, answer) for name, answers in WRAPPED.items() for answer in answers]


def _value(source: random.Random, levels: int) -> Any:
    kind = source.randrange(4 if levels else 2)
    if kind == 0:
        return source.choice(_STRINGS)
    if kind == 1:
        return source.choice(_NUMBERS)
    if kind == 2:
        return [_value(source, levels - 1) for _ in range(source.randrange(4))]
    return {source.choice(_STRINGS) + str(n): _value(source, levels - 1) for n in range(source.randrange(4))}


def _arguments(source: random.Random) -> dict[str, Any]:
    return {name: _value(source, 3) for name in source.sample(["a", "b", "c", "é\n"], source.randrange(5))}


def _written(value: Any, source: random.Random) -> str:
    """JSON text of a value, with blanks and escapes as models may write them."""
    text = json.dumps(
        value,
        ensure_ascii=source.random() < 0.5,
        indent=source.choice((None, None, 1)),
        separators=source.choice(((", ", ": "), (",", ":"), (" ,\n", " :\t"))),
    )
    return text.replace("/", "\\/") if source.random() < 0.2 else text


def _cuts(text: str, source: random.Random, number: int) -> list[str]:
    places = sorted(source.sample(range(len(text) + 1), min(number, len(text))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def _fed(parser: OutputParser, pieces: list[str], cut: bool = False) -> list[Segment]:
    return [segment for piece in pieces for segment in parser.feed(piece, 1)] + parser.finish(cut)


def _told(segments: list[Segment]) -> list[tuple[str, str, bool]]:
    return [(call.name, call.arguments, call.is_whole) for call in calls_in(segments)]


def _texts(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments if segment.kind in (TEXT, REASONING))


def test_an_object_is_written_as_the_whole_object_would_be() -> None:
    source = random.Random(1)
    for _ in range(400):
        value = _arguments(source)
        text = _written(value, source)
        expected = compact(json.loads(text))
        for pieces in ([text], list(text), _cuts(text, source, 5)):
            writer, known, told = CompactObject(2), "  ", ""
            for piece in pieces:
                known += piece
                told += writer.write(known)
            assert (told, writer.is_whole, writer.at) == (expected, True, len(known))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a" 1}', '{"a"'),
        ('{"a": tru}', '{"a":'),
        ('{"a": NaN}', '{"a":'),
        ('{"a": -Infinity}', '{"a":'),
        ('{"a": 01}', '{"a":'),
        ('{"a": 1.}', '{"a":'),
        ('{"a": "\\x"}', '{"a":"'),
        ('{"a": "\\u12g4"}', '{"a":"'),
        ('{"a": "\\ud83d\\u00g0"}', '{"a":"\ufffd'),
        ("{'a': 1}", "{"),
        ('{"a": 1,}', '{"a":1,'),
        ('{"a": [1,]}', '{"a":[1,'),
        ('{"a": [1}', '{"a":[1'),
        ('{"a": 1e999}', '{"a":'),
        ('{"a": ' + "9" * 400 + "}", '{"a":'),
        ('{"a": ' + "9" * 6000 + "}", '{"a":'),
        ('{"a": ' * (MOST_LEVELS + 1), '{"a":' * MOST_LEVELS),
    ],
)
def test_arguments_break_off_where_the_text_is_no_json(text: str, told: str) -> None:
    for pieces in ([text], list(text)):
        writer, known, said = CompactObject(0), "", ""
        for piece in pieces:
            known += piece
            said += writer.write(known)
        assert (said, writer.is_whole, writer.is_broken) == (told, False, True)


def test_of_a_key_that_stands_twice_both_members_stay() -> None:
    for pieces in (['{"a": 1, "a": {"b": 2, "b": 3}}'], list('{"a": 1, "a": {"b": 2, "b": 3}}')):
        writer, known, said = CompactObject(0), "", ""
        for piece in pieces:
            known += piece
            said += writer.write(known)
        assert said == '{"a":1,"a":{"b":2,"b":3}}'
        assert json.loads(said) == {"a": {"b": 3}}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "answer"), NOTATIONS)
def test_the_pieces_of_a_call_add_up_to_the_call(name: str, answer: str) -> None:
    form, source = BUILT[name][1], random.Random(answer)
    for _ in range(25):
        value, function = _arguments(source), source.choice(("f", "lookup.it"))
        text = answer % (function, _written(value, source))
        if name == "gemma4" and "\n" in text and not value:
            continue
        expected = [(function, compact(value), True)]
        for pieces in ([text], list(text), _cuts(text, source, 4), _cuts(text, source, 12)):
            segments = _fed(form.parser("", TOOLS), pieces)
            assert _told(segments) == expected, text
            assert not _texts(segments).strip()


@pytest.mark.parametrize(("name", "answer"), NOTATIONS)
def test_arguments_leave_before_the_call_has_ended(name: str, answer: str) -> None:
    form = BUILT[name][1]
    text = answer % ("f", '{"a": "one two three four", "b": [1, 2, 3]}')
    at = text.index(" four")
    parser = form.parser("", TOOLS)
    early = [segment for letter in text[:at] for segment in parser.feed(letter, 1)]
    assert "".join(segment.text for segment in early) == '{"a":"one two three'
    late = [segment for letter in text[at:] for segment in parser.feed(letter, 1)]
    [call] = calls_in([*early, *late, *parser.finish(False)])
    assert call.arguments == '{"a":"one two three four","b":[1,2,3]}' and call.is_whole
    assert len(call.pieces) > 10


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "answer"), NOTATIONS)
def test_a_call_that_is_cut_off_is_a_call_with_a_beginning_of_its_arguments(name: str, answer: str) -> None:
    form = BUILT[name][1]
    text = answer % ("lookup.it", '{"a": "x y", "b": 12}')
    whole = '{"a":"x y","b":12}'
    named = text.index("lookup.it") + len("lookup.it")
    for end in range(1, len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            segments = _fed(form.parser("", TOOLS), pieces, cut=True)
            told, said = _told(segments), _texts(segments)
            assert len(told) <= 1
            if told:
                assert told[0][0] == "lookup.it" and end >= named
                assert whole.startswith(told[0][1]) and told[0][2] is (told[0][1] == whole)
                assert not said.strip(), text[:end]
            if end > text.index('"x'):
                assert told and told[0][1].startswith('{"a":"'), text[:end]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "answer"), NOTATIONS)
def test_what_breaks_off_is_told_alike_however_it_is_cut(name: str, answer: str) -> None:
    form, source = BUILT[name][1], random.Random(answer)
    marks = ["<", "}", "{", "]", ",", '"', "\\", "\n", "1", "tru", ":", *form.marks]
    for _ in range(40):
        text = answer % ("f", _written(_arguments(source), source))
        at = source.randrange(len(text) + 1)
        text = (
            text[:at] + source.choice(marks) + text[at + source.randrange(3) :] + source.choice(("", " so"))
        )
        cut = source.random() < 0.5
        expected = _fed(form.parser("", TOOLS), [text], cut)
        for pieces in (list(text), _cuts(text, source, 4)):
            segments = _fed(form.parser("", TOOLS), pieces, cut)
            assert _told(segments) == _told(expected), text
            assert _texts(segments) == _texts(expected), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", '<tool_call>{"name": "unknown", "arguments": {"a": [1}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": {...}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("json", '{"name": "f", "value": {"a": 1}}'),
        ("json", '{"name": "Bob", "arguments": {"a": 1}}'),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{no}"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>no"),
        ("template", '<tool_call>{"name": "f", "arguments": {...}}</tool_call>'),
    ],
)
def test_a_text_that_turns_out_to_be_no_call_is_released(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        segments = _fed(BUILT[name][1].parser("", TOOLS), pieces)
        assert not calls_in(segments) and _texts(segments) == text


def test_text_behind_arguments_that_break_off_is_visible_and_later_calls_are_read() -> None:
    begin = '{"name": "f", "arguments": {'
    broken, whole = f'{begin}"a": 1', f"{begin}}}}}"
    text = f"{_PLAIN_TAG % broken} so {_PLAIN_TAG % whole}"
    for pieces in ([text], list(text)):
        segments = _fed(BUILT["qwen"][1].parser("", TOOLS), pieces)
        assert _told(segments) == [("f", '{"a":1', False), ("f", "{}", True)]
        assert _texts(segments) == " so "
        assert next(each.kind for each in segments if each.kind in (TEXT, CALL_CUT)) == CALL_CUT


def test_parameters_in_xml_leave_one_by_one() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx </tool\n</parameter>\n"
    )
    for end, told, is_whole in (
        ("</function>\n</tool_call>", '{"a":"1","b":"x </tool"}', True),
        ("<parameter=c>\nno", '{"a":"1","b":"x </tool"', False),
        ("", '{"a":"1","b":"x </tool"', False),
    ):
        for pieces in ([text + end], list(text + end)):
            segments = _fed(BUILT["qwen_xml"][1].parser("", TOOLS), pieces, cut=True)
            [call] = calls_in(segments)
            assert (call.arguments, call.is_whole) == (told, is_whole)
            assert call.pieces[:2] == ('{"a":"1"', ',"b":"x </tool"') or len(pieces) == 1
            assert not _texts(segments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", '<|tool_call>call:f{a:<|"|>x'),
        ("gemma", '```tool_code\nf(a="x'),
        ("python", "<function_calls>[f(a='x'), lookup.it(a='y"),
        ("qwen", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1'),
        ("qwen", '<tool_call>{"name": "f", "argu'),
        ("json", '{"name": "f", "parameters"'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>"),
        ("template", '<tool_call>{"name": "f"'),
    ],
)
def test_a_call_that_is_cut_off_behind_its_name_has_no_arguments(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        segments = _fed(BUILT[name][1].parser("", TOOLS), pieces, cut=True)
        *whole, last = calls_in(segments)
        assert (last.name, last.arguments, last.is_whole) == ((whole and "lookup.it") or "f", "", False)
        assert all(call.is_whole for call in whole) and not _texts(segments)


@pytest.mark.parametrize("parts", [("f", "f"), ("f", "lookup.it")])
def test_a_call_that_may_repeat_another_waits_until_it_differs(parts: tuple[str, str]) -> None:
    calls = CalledFunctions(ToolUse(TOOLS.functions, "required"), in_pieces=True)
    first = [segment for part in Call("f", '{"a":1}').segments() for segment in calls.take(part)]
    assert calls_in(first)[0].arguments == '{"a":1}'
    begun = calls.take(Segment(CALLED, call=CalledFunction(parts[1])))
    assert bool(begun) is (parts[1] != "f")
    assert bool(calls.take(Segment(ARGUMENTS, '{"a":'))) is (parts[1] != "f")
    told = calls.take(Segment(ARGUMENTS, "2}"))
    assert "".join(each.text for each in told) == ("2}" if begun else '{"a":2}')
    assert not calls.is_over and calls.take(Segment(CALL_ENDED)) == [Segment(CALL_ENDED)]
    again = [segment for part in Call("f", '{"a":1}').segments() for segment in calls.take(part)]
    assert again == [] and calls.is_over and calls.count == 2


def test_without_pieces_a_call_waits_for_its_end() -> None:
    calls = CalledFunctions(None, in_pieces=False)
    parts = [
        Segment(CALLED, call=CalledFunction("f")),
        Segment(ARGUMENTS, "{", tokens=2),
        Segment(ARGUMENTS, "}"),
    ]
    assert not any(calls.take(part) for part in parts)
    assert calls.take(Segment(CALL_ENDED)) == [
        parts[0],
        Segment(ARGUMENTS, "{}", tokens=2),
        Segment(CALL_ENDED),
    ]
    cut = CalledFunctions(None, in_pieces=False)
    cut.take(parts[0])
    assert cut.take(Segment(CALL_CUT)) == [parts[0], Segment(CALL_CUT)]
