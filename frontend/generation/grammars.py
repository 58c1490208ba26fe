"""The form that an answer must have: `response_format` and `grammar` of a request, as a grammar of llguidance.

1. `response_format` is `text`, `json_object`, or `json_schema` with its schema; a schema is always enforced.
2. `grammar` is `{"type": regex | json_schema | lark | llguidance, "value"}`. Only one of both may be given.
3. A grammar is bounded in bytes here. The worker compiles the grammar, and reports its mistakes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from frontend.generation.errors import InvalidField
from frontend.generation.nested import json_text, values_of
from ipc.wire.messages import Grammar

MAX_GRAMMAR_NBYTES = 256 << 10
_TEXT_KINDS = ("regex", "lark")
_JSON_KINDS = ("json_schema", "llguidance")


def grammar_of(response_format: Any, grammar: Any, field: str = "response_format") -> Grammar | None:
    """The grammar of a request; `field` names the first value in messages. Raises `InvalidField`."""
    if response_format is not None and grammar is not None:
        raise InvalidField("grammar", f"cannot be used together with {field}")
    if grammar is not None:
        return _given_grammar(grammar)
    found = None if response_format is None else _format_grammar(response_format, field)
    return None if found is None else msgspec.structs.replace(found, field=field)


def schema_grammar(schema: Any, field: str) -> Grammar:
    """The grammar of a JSON schema, which `field` of the request holds. Raises `InvalidField`."""
    return msgspec.structs.replace(_schema(schema, field), field=field)


def _format_grammar(given: Any, field: str) -> Grammar | None:
    """The grammar of a response format. The schema stands under `json_schema`, or beside `type`."""
    kind = kind_of(given, field)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind != "json_schema":
        raise InvalidField(f"{field}.type", f"{kind[:64]!a} is not one of text, json_object, json_schema")
    inner, place = given.get("json_schema"), f"{field}.json_schema"
    if inner is None and "schema" in given:
        inner, place = given, field
    if not isinstance(inner, dict):
        raise InvalidField(place, "expected an object with a schema")
    schema = inner.get("schema")
    return Grammar("json_object") if schema is None else _schema(schema, f"{place}.schema")


def _given_grammar(given: Any) -> Grammar:
    kind, value = kind_of(given, "grammar"), given.get("value")
    if kind in _TEXT_KINDS:
        if not isinstance(value, str):
            raise InvalidField("grammar.value", f"expected a string for type {kind}")
        return _bounded(Grammar(kind, value), "grammar.value")
    if kind not in _JSON_KINDS:
        known = ", ".join((*_TEXT_KINDS, *_JSON_KINDS))
        raise InvalidField("grammar.type", f"{kind[:64]!a} is not one of {known}")
    if isinstance(value, str):
        value = values_of(value, "grammar.value")
    if kind == "json_schema":
        return _schema(value, "grammar.value")
    if not isinstance(value, dict):
        raise InvalidField("grammar.value", "expected an object with grammars")
    return _bounded(Grammar(kind, json_text(value, "grammar.value")), "grammar.value")


def kind_of(given: Any, field: str) -> str:
    """The `type` of an object of a request. Raises `InvalidField`."""
    if not isinstance(given, dict):
        raise InvalidField(field, "expected an object with a type")
    kind = given.get("type")
    if not isinstance(kind, str):
        raise InvalidField(f"{field}.type", "expected a string")
    return kind


def _schema(schema: Any, field: str) -> Grammar:
    if not isinstance(schema, dict | bool):
        raise InvalidField(field, "expected an object")
    return _bounded(Grammar("json_schema", json_text(schema, field)), field)


def _bounded(grammar: Grammar, field: str) -> Grammar:
    nbytes = len(grammar.value.encode())
    if nbytes > MAX_GRAMMAR_NBYTES:
        raise InvalidField(field, f"{nbytes} bytes, the limit is {MAX_GRAMMAR_NBYTES}")
    return grammar
