"""Dates and times by grammars: whatever a model prefers, a validator accepts the text."""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ipc.errors import InvalidInput
from ipc.wire.messages import GenerateCall, Grammar, ToolUse
from ipc.wire.streams import TEXT
from tests.harness.guided_model import Model
from workers.generation import grammar_formats

READERS: dict[str, Callable[[str], Any]] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
}
GOOD = {
    "date": ["0001-01-01", "2024-02-29", "2000-02-29", "0004-02-29", "2023-04-30", "9999-12-31"],
    "time": ["00:00:00Z", "23:59:59.123456+23:59", "12:30:00.5-01:00"],
    "date-time": ["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.001+14:00"],
}
BAD = {
    "date": [
        "0000-01-01",
        "0000-02-29",
        "2023-02-29",
        "1900-02-29",
        "2024-02-30",
        "2023-04-31",
        "2023-13-01",
    ],
    "time": [
        "23:59:60Z",
        "24:00:00Z",
        "12:60:00Z",
        "12:00:00",
        "12:00:00z",
        "12:00:00.1234567Z",
        "12:00:00+24:00",
    ],
    "date-time": [
        "0000-01-01T00:00:00Z",
        "2023-02-29T00:00:00Z",
        "2023-01-01T23:59:60Z",
        "2023-01-01t00:00:00Z",
    ],
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """One for all tests."""
    made = Model("chatml")
    yield made
    made.grammars.close()


def _written(schema: Any) -> list[Grammar]:
    """The same schema in all forms of a grammar."""
    text = json.dumps(schema)
    return [
        Grammar("json_schema", text),
        Grammar("llguidance", json.dumps({"grammars": [{"json_schema": schema}]})),
        Grammar("llguidance", json.dumps({"grammars": [{"lark_grammar": f"start: %json {text}"}]})),
        Grammar("lark", f"start: a\na: %json {text}"),
    ]


def _takes(model: Model, grammar: Grammar, value: Any) -> bool:
    """Whether an answer may be this value and nothing less."""
    guide = model.guide(GenerateCall(grammar=grammar), "")
    ids = model.tokenizer(json.dumps(value, separators=(",", ":")), add_special_tokens=False).input_ids
    return all(guide.consume(token) for token in ids) and guide.is_accepting


@pytest.mark.parametrize("kind", READERS)
def test_random_answers_are_read_by_python_and_by_a_validator(model: Model, kind: str) -> None:
    grammar = Grammar("json_schema", json.dumps({"type": "string", "format": kind}))
    texts = [json.loads(model.answer(GenerateCall(grammar=grammar), seed).said(TEXT)) for seed in range(30)]
    validator = Draft202012Validator.FORMAT_CHECKER
    assert len(set(texts)) > 20 and kind in validator.checkers
    for text in texts:
        READERS[kind](text)
        assert validator.conforms(text, kind)


@pytest.mark.parametrize("kind", READERS)
def test_edges_of_dates_and_times_hold_in_every_form_of_a_grammar(model: Model, kind: str) -> None:
    for grammar in _written({"type": "string", "format": kind}):
        assert [text for text in GOOD[kind] if not _takes(model, grammar, text)] == []
        assert [text for text in BAD[kind] if _takes(model, grammar, text)] == []


def test_the_pattern_of_dates_has_the_days_of_the_calendar() -> None:
    written = json.loads(grammar_formats.of_grammar('{"grammars": [{"json_schema": {"format": "date"}}]}'))
    pattern = re.compile(written["grammars"][0]["json_schema"]["pattern"])
    for year in (0, 1, 4, 99, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9996, 9999):
        for month in range(14):
            known = calendar.monthrange(year, month)[1] if year and 1 <= month <= 12 else 0
            days = [day for day in range(40) if pattern.search(f"{year:04}-{month:02}-{day:02}")]
            assert days == list(range(1, known + 1)), (year, month)
    for year in range(1, 10_000):
        assert bool(pattern.search(f"{year:04}-02-29")) == calendar.isleap(year)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date", "pattern": "^20"},
        {"type": "string", "pattern": "^20", "format": "date", "allOf": [{"minLength": 3}]},
        {"allOf": [{"type": "string", "format": "date"}, {"pattern": "^20"}]},
        {"$ref": "#/$defs/day", "pattern": "^20", "$defs": {"day": {"type": "string", "format": "date"}}},
        {"type": "string", "format": "date", "enum": ["2024-02-29", "2023-02-29"]},
        {"anyOf": [{"type": "string", "format": "date", "pattern": "^20"}, {"type": "null"}]},
    ],
    ids=json.dumps,
)
def test_a_format_holds_beside_other_keywords(model: Model, schema: dict[str, Any]) -> None:
    for grammar in _written(schema):
        assert _takes(model, grammar, "2024-02-29")
        assert not any(_takes(model, grammar, text) for text in ("2023-02-29", "1996-02-29", "20"))


def test_values_and_properties_of_that_name_are_no_formats(model: Model) -> None:
    value = {"format": "date"}
    for schema in ({"const": value}, {"enum": [value]}, {"properties": {"format": {"type": "string"}}}):
        assert all(_takes(model, grammar, value) for grammar in _written(schema))
    bare = Grammar("json_schema", json.dumps({"format": "date"}))
    assert _takes(model, bare, 5) and _takes(model, bare, "2024-02-29") and not _takes(model, bare, "x")
    with pytest.raises(InvalidInput, match="'format' 'Date' is not one of"):
        model.guide(GenerateCall(grammar=Grammar("json_schema", '{"format": "Date"}')), "")


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_of_functions_have_dates_that_a_validator_accepts(model: Model, strict: bool) -> None:
    properties = {
        "day": {"type": "string", "format": "date"},
        "at": {"type": "string", "format": "date-time"},
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["day", "at"],
        "additionalProperties": False,
    }
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    use = ToolUse([function], "named", name="f", strict=["f"] if strict else [])
    for seed in range(6):
        ((_, arguments),) = model.answer(GenerateCall(tools=use), seed).calls
        date.fromisoformat(arguments["day"])
        datetime.fromisoformat(arguments["at"])
