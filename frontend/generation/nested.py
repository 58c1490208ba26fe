"""Values whose form a request chooses: schemas of functions, arguments of calls, and the form of an answer.

1. Numbers are read as they are written: an integer of any length stays an integer, and a number with more digits than
   a double holds becomes a `Decimal` (`written`).
2. Messages to workers have integers of 64 bits and doubles. `json_text` refuses every other number by its digits.

`grammar_of` makes a grammar of llguidance from the form that an answer must have:

1. `response_format` is `text`, `json_object`, or `json_schema` with its schema; a schema is always enforced.
2. `grammar` is `{"type": regex | json_schema | lark | llguidance, "value"}`. Only one of both may be given.
3. A grammar is bounded in bytes here. The worker compiles the grammar, and reports its mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec
import orjson

from frontend.generation.errors import InvalidField, shown
from ipc.wire.codec import long_integer_in
from ipc.wire.messages import Grammar
from ipc.wire.streams import MOST_LEVELS

_NUL = b"\\u0000"
"""NUL in JSON text, or a backslash in front of these characters."""
_SHORT = 15
"""Characters of a number, with a point and without an exponent, whose digits every double keeps."""
_exact = msgspec.json.Encoder(decimal_format="number")
MAX_GRAMMAR_NBYTES = 256 << 10
_TEXT_KINDS = ("regex", "lark")
_JSON_KINDS = ("json_schema", "llguidance")


def written(text: str) -> float | Decimal:
    """A JSON number with a point or an exponent: as a double if the double is written with the same digits.

    Raises ValueError for a number beyond all doubles.
    """
    number = float(text)
    if len(text) <= _SHORT and "e" not in text and "E" not in text:
        return number
    if number in (float("inf"), float("-inf")):
        raise ValueError("number out of range")
    exact = Decimal(text)
    return number if exact == Decimal(repr(number)) else exact


_values = msgspec.json.Decoder(float_hook=written)


def values_of(text: str, field: str) -> Any:
    """The values of JSON text. Raises `InvalidField` for text that is no JSON."""
    try:
        return _values.decode(text)
    except RecursionError:
        raise InvalidField(field, "is nested too deeply") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidField(field, f"is no JSON: {str(error)[:200]}") from None


def json_text(value: Any, field: str) -> str:
    """JSON text of a decoded value.

    Raises `InvalidField` for a value with too many levels, a NUL character in a text, or a number that no message has.
    """
    text = checked_json(value, field)
    _check_nul(text, value, field)
    return text.decode()


def checked_json(value: Any, field: str) -> bytes:
    """JSON text of a decoded value, whose texts are not checked. Raises `InvalidField` for levels and numbers."""
    check_depth(value, field)
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise InvalidField(field, _lack(value) or str(error)[:200]) from None


def arguments_of(value: dict[str, Any], field: str) -> tuple[dict[str, Any] | str, str]:
    """Arguments of a call as messages have them, and their JSON text.

    Messages have the text itself where a number of the arguments needs more than 64 bits or the digits of a double.
    Raises `InvalidField` for too many levels or a NUL character.
    """
    check_depth(value, field)
    try:
        text, is_plain = orjson.dumps(value), True
    except TypeError:
        text, is_plain = _exact.encode(value), False
    _check_nul(text, value, field)
    return value if is_plain else text.decode(), text.decode()


def check_depth(value: Any, field: str) -> None:
    """Raise `InvalidField` for a value that is nested too deeply."""
    # PERF: only lists and objects are followed, most values of a schema are neither.
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for part in level for inner in _parts(part) if isinstance(inner, dict | list)]
        if not level:
            return
    raise InvalidField(field, f"nested over {MOST_LEVELS} levels")


def _check_nul(text: bytes, value: Any, field: str) -> None:
    if _NUL in text and _has_nul(value):
        raise InvalidField(field, "holds a NUL character")


def _lack(value: Any) -> str:
    """Why the first number of `value` that no message has is refused; empty without such a number."""
    long = long_integer_in(value)
    if long is not None:
        return str(long._replace(path=""))
    digits = _digits_in(value)
    return "" if digits is None else f"{shown(digits)} has more digits than a double holds"


def _digits_in(value: Any) -> Decimal | None:
    """The first number with too many digits."""
    if isinstance(value, Decimal):
        return value
    return next((digits for part in _parts(value) if (digits := _digits_in(part)) is not None), None)


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    keys = value if isinstance(value, dict) else ()
    return any(map(_has_nul, keys)) or any(map(_has_nul, _parts(value)))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def grammar_of(response_format: Any, grammar: Any, field: str = "response_format") -> Grammar | None:
    """The grammar of a request; `field` names the first value in messages. Raises `InvalidField`."""
    if response_format is not None and grammar is not None:
        raise InvalidField("grammar", f"cannot be used together with {field}")
    if grammar is not None:
        return _given_grammar(grammar)
    form = None if response_format is None else _format_grammar(response_format, field)
    return None if form is None else msgspec.structs.replace(form, field=field)


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
