"""Numbers of schemas in real grammars: a grammar takes exactly the digits of a number, or is refused by name."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from typing import Any

import pytest

from ipc.errors import InvalidInput
from ipc.wire.messages import GenerateCall, Grammar, ToolUse
from tests.tiny import chat_tokenizers
from workers.generation.formats.table import detect
from workers.generation.grammar import Grammars, Guide
from workers.generation.templates import ChatTemplate

EXACT = [2**53 - 1, 2**53, -(2**53), 2**53 + 2, 2**60, -(2**62), 10**17, 2**63 - 1]
CHANGED = [2**53 + 1, -(2**53) - 1, 2**60 + 1, 2**63, -(2**63), 2**64 - 1, -(2**63) + 1]
EQUALITIES = ['{"const": V}', '{"enum": [V]}', '{"anyOf": [{"enum": [V, "x"]}]}']
NESTED = ['{"const": [{"a": V}]}', '{"type": "object", "properties": {"enum": {"const": V}}}']
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]


class Known:
    """Grammars of one tokenizer."""

    def __init__(self) -> None:
        self.tokenizer = chat_tokenizers.build("qwen3")
        form = detect(self.tokenizer, ChatTemplate(self.tokenizer).text, "")
        ends = chat_tokenizers.end_ids("qwen3", self.tokenizer)
        self.grammars = Grammars(self.tokenizer, len(self.tokenizer), ends, form)

    def takes(self, schema: str, text: str) -> bool:
        """Whether an answer by the schema may be `text` and nothing less."""
        guide = self.guide(GenerateCall(grammar=Grammar("json_schema", schema)))
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return all(guide.consume(token) for token in ids) and guide.is_accepting

    def guide(self, call: GenerateCall) -> Guide:
        make = self.grammars.factory(call, "<think>\n\n</think>\n\n", 64)
        assert make is not None
        guide = make()
        assert isinstance(guide, Guide)
        return guide


@pytest.fixture(scope="module")
def known() -> Iterator[Known]:
    """One for all tests."""
    made = Known()
    yield made
    made.grammars.close()


@pytest.mark.parametrize("value", EXACT)
def test_a_grammar_of_one_integer_takes_its_digits_and_none_of_its_neighbours(
    known: Known, value: int
) -> None:
    for schema in EQUALITIES:
        text = schema.replace("V", str(value))
        assert known.takes(text, str(value))
        assert not any(known.takes(text, str(value + by)) for by in (-2, -1, 1, 2))
    assert known.takes(NESTED[0].replace("V", str(value)), json.dumps([{"a": value}], separators=(",", ":")))


@pytest.mark.parametrize("value", [2**53 - 1, 1 - 2**53, 4503599627370497, 1000])
def test_bounds_within_doubles_hold_to_the_last_integer(known: Known, value: int) -> None:
    inside = {"minimum": operator.ge, "maximum": operator.le, "exclusiveMinimum": operator.gt}
    for keyword, is_inside in {**inside, "exclusiveMaximum": operator.lt}.items():
        schema = json.dumps({"type": "integer", keyword: value})
        for number in range(value - 2, value + 3):
            assert known.takes(schema, str(number)) == is_inside(number, value), (keyword, value, number)


@pytest.mark.parametrize("value", [2**53, -(2**53)])
def test_a_bound_whose_neighbour_is_no_double_is_refused(known: Known, value: int) -> None:
    for keyword in BOUNDS:
        schema = json.dumps({"type": "integer", keyword: value})
        with pytest.raises(InvalidInput, match=f"{value} in '{keyword}'"):
            known.guide(GenerateCall(grammar=Grammar("json_schema", schema)))


def test_the_longest_integer_of_64_bits_bounds_exactly(known: Known) -> None:
    schema = json.dumps({"type": "integer", "minimum": 0, "maximum": 2**63 - 1})
    assert known.takes(schema, str(2**63 - 1)) and not known.takes(schema, str(2**63))


@pytest.mark.parametrize("value", CHANGED)
def test_a_number_that_a_grammar_would_change_is_refused_by_its_digits(known: Known, value: int) -> None:
    schemas = [*EQUALITIES, *NESTED, *(f'{{"type": "integer", "{keyword}": V}}' for keyword in BOUNDS)]
    for schema in schemas:
        text = schema.replace("V", str(value))
        within = json.dumps({"grammars": [{"json_schema": json.loads(text)}]})
        for grammar in (
            Grammar("json_schema", text, field="response_format"),
            Grammar("llguidance", within, field="response_format"),
            Grammar("lark", f'start: "<" %json {text} ">"', field="response_format"),
        ):
            with pytest.raises(InvalidInput, match=str(value)) as caught:
                known.guide(GenerateCall(grammar=grammar))
            assert caught.value.detail == {"param": "response_format"}


def test_numbers_that_are_no_rule_are_let_through(known: Known) -> None:
    for schema in (
        {"type": "integer", "default": 2**53 + 1, "examples": [2**64 - 1]},
        {"enum": [str(2**53 + 1)]},
        {"type": "object", "properties": {"a": {"type": "integer", "default": 2**63}}},
    ):
        known.guide(GenerateCall(grammar=Grammar("json_schema", json.dumps(schema))))


def _tools(schema: dict[str, Any], *, strict: bool) -> GenerateCall:
    parameters = {"type": "object", "properties": {"n": schema}, "required": ["n"]}
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return GenerateCall(tools=ToolUse([function], "required", strict=["f"] if strict else []))


@pytest.mark.parametrize("strict", [False, True])
def test_parameters_of_functions_keep_their_numbers_or_are_refused(known: Known, strict: bool) -> None:
    refused: list[dict[str, Any]] = [
        {"enum": [2**53 + 1]},
        {"const": 2**64 - 1},
        {"type": "integer", "minimum": 2**53 + 1},
    ]
    for schema in refused:
        [value] = schema.get("enum") or [schema.get("const", schema.get("minimum"))]
        with pytest.raises(InvalidInput, match=f"function 'f'.*{value}") as caught:
            known.guide(_tools(schema, strict=strict))
        assert caught.value.detail == {"param": "tools"}
    known.guide(_tools({"enum": [2**53]}, strict=strict))


def test_bounds_that_say_only_64_bits_leave_a_loose_function_callable(known: Known) -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}
    known.guide(_tools(schema, strict=False))
    with pytest.raises(InvalidInput, match=str(-(2**63))):
        known.guide(_tools(schema, strict=True))
