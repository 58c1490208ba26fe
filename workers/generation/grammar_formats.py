"""Where llguidance and validators of schemas differ: dates, times, large numbers, and the words of errors.

llguidance's own `date` has a year 0000 and the 29th of February in each year, and its `time` has a second 60.
`of_grammar` writes a pattern in place of these formats: years 0001 to 9999, seconds 00 to 59, six digits of a fraction
at most, `T` and `Z` in upper case.

llguidance reads every number of a schema as a double. A larger integer becomes its neighbour without a word, so such
schemas are refused before llguidance sees them.

1. `lost_numbers` looks through the schemas of a whole grammar: of its JSON, or behind `%json` in Lark.
2. `lost` looks through one schema: values of `const` and `enum`, and bounds. A default or an example is no rule.

Errors are told in the words of schemas, without names of the library's own parts:

1. `plain` replaces the errors that speak of parts or types of a program. Any other error stays as found.
2. `of_function` leaves out the line and the place of an error in a grammar that no client has written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Values of `format` that a grammar can hold to."""
_MOST_VALUE = 200
_LINE = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"at \d+\(\d+\): ")
_WRAPPED = "failed to compile JSON schema: "
_BASE = "json-schema:///"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = f"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_CLOCK})"
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}


_MAYBE = re.compile(r'"format"\s*:|\\"format\\"')
"""PERF: text without such a keyword has no format, and most schemas are such text."""
MOST_INTEGER = (1 << 53) - 1
"""Integers up to this one are doubles, and so are their neighbours."""
MOST_LONG = (1 << 63) - 1
_EQUALITIES = ("const", "enum")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names of the client's choice."""
_NO_RULES = ("default", "examples", "example", "x-guidance")
_MAYBE_LONG = re.compile(r"[0-9]{16}|[0-9][eE]")
"""PERF: text without such a number has none that could be lost, and most schemas are such text."""
_SCHEMA = re.compile(r"%json\s*(?=[{\[])")


def of_grammar(text: str) -> str:
    """A grammar of llguidance, in its JSON or in Lark, with patterns in place of dates and times."""
    if not _MAYBE.search(text):
        return text
    if not text.startswith("{"):
        return _lark(text)
    try:
        value = json.loads(text)
        grammars = value.get("grammars")
        for grammar in grammars if isinstance(grammars, list) else ():
            if isinstance(grammar, dict):
                _write(grammar.get("json_schema"))
                if isinstance(lark := grammar.get("lark_grammar"), str):
                    grammar["lark_grammar"] = _lark(lark)
        return json.dumps(value)
    except (ValueError, RecursionError):
        return text


def _lark(text: str) -> str:
    pieces, done = [], 0
    for begin, end, schema in within_lark(text):
        if begin >= done and _write(schema):
            pieces += [text[done:begin], json.dumps(schema)]
            done = end
    return "".join([*pieces, text[done:]])


def _write(schema: Any) -> bool:
    """Write patterns into a schema; returns whether there was a date or a time."""
    formatted = [part for part in parts(schema) if part.get("format") in tuple(_PATTERNS)]
    for part in formatted:
        pattern = _PATTERNS[part.pop("format")]
        if "pattern" not in part:
            part["pattern"] = pattern
        else:
            inner = part.setdefault("allOf", [])
            if isinstance(inner, list):
                inner.append({"pattern": pattern})
    return bool(formatted)


class Lost(NamedTuple):
    """A number that a grammar cannot hold, and the keyword that has the number."""

    keyword: str
    number: int | float

    def __str__(self) -> str:
        limit = f"{-MOST_INTEGER} to {MOST_INTEGER}"
        return (
            f"{self.number} in {self.keyword!r} cannot be held exactly: grammars hold integers from {limit}"
        )

    @property
    def is_type_bound(self) -> bool:
        """Whether the number only says that integers have 64 bits, as generated schemas do."""
        return self.keyword in _BOUNDS and abs(self.number) >= MOST_LONG


def lost_numbers(text: str) -> Lost | None:
    """The first number that is lost in a grammar of llguidance, in its JSON or in Lark."""
    if not _MAYBE_LONG.search(text):
        return None
    return next((found for schema in _schemas(text) if (found := lost(schema))), None)


def lost(schema: Any) -> Lost | None:
    """The first number of a schema that is lost."""
    return next(_lost(schema), None)


def _schemas(text: str) -> Iterator[Any]:
    if not text.startswith("{"):
        yield from (schema for _, _, schema in within_lark(text))
        return
    try:
        grammars = json.loads(text).get("grammars")
    except (ValueError, RecursionError):
        return
    for grammar in grammars if isinstance(grammars, list) else ():
        if isinstance(grammar, dict):
            yield grammar.get("json_schema")
            lark = grammar.get("lark_grammar")
            yield from (schema for _, _, schema in within_lark(lark if isinstance(lark, str) else ""))


def within_lark(text: str) -> Iterator[tuple[int, int, Any]]:
    """Begin and end of each schema in a grammar in Lark, and the schema as decoded for this call."""
    decoder = json.JSONDecoder()
    for mark in _SCHEMA.finditer(text):
        try:
            schema, end = decoder.raw_decode(text, mark.end())
        except (ValueError, RecursionError):
            continue
        yield mark.end(), end, schema


def parts(schema: Any) -> Iterator[Any]:
    """The mappings that are rules of a schema, in order of the text."""
    # NOTE: without recursion: a hostile schema may be nested as deep as a message can be.
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            yield each
            left += reversed([part for keyword, value in each.items() for part in _inner(keyword, value)])
        elif isinstance(each, list):
            left += reversed(each)


def _lost(schema: Any) -> Iterator[Lost]:
    for part in parts(schema):
        for keyword, value in part.items():
            if keyword in _EQUALITIES:
                yield from (Lost(keyword, number) for number in _numbers(value) if not _is_equal(number))
            elif keyword in _BOUNDS:
                yield from _bound(keyword, value, part)


def _inner(keyword: str, value: Any) -> Iterable[Any]:
    """The schemas under a keyword."""
    if keyword in _EQUALITIES or keyword in _NO_RULES:
        return ()
    return value.values() if keyword in _NAMED and isinstance(value, Mapping) else (value,)


def _bound(keyword: str, value: Any, schema: Mapping[str, Any]) -> Iterator[Lost]:
    is_longest = keyword == "maximum" and value == MOST_LONG and schema.get("type") == "integer"
    if isinstance(value, int | float) and abs(value) > MOST_INTEGER and not is_longest:
        yield Lost(keyword, value)


def _is_equal(number: int | float) -> bool:
    """Whether a grammar of this one number accepts its digits and no others."""
    if abs(number) <= MOST_INTEGER or number == MOST_LONG:
        return True
    return abs(number) < MOST_LONG and int(float(number)) == number


def _numbers(value: Any) -> Iterator[int | float]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            left += reversed(list(each.values()))
        elif isinstance(each, list):
            left += reversed(each)
        elif isinstance(each, int | float):
            yield each


def _value(text: str) -> str:
    """A value of a schema as messages show the value."""
    return ascii(text.removeprefix(_BASE)[:_MOST_VALUE])


_WORDS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (
        r"NoExtension(?:Bias)?",
        lambda _: "no text fits: a rule or a '$ref' leads back to itself, or two rules exclude each other",
    ),
    (
        r"parser error: Too many items \(limit [0-9]+; ff_tokens\).*",
        lambda _: (
            "the text that must follow has no end: a required part with a '$ref' leads back to itself, or a value is "
            "too long"
        ),
    ),
    (
        r"circular references with sibling keys are not supported: (.*)",
        lambda found: f"'$ref' {_value(found[1])} leads back to itself, and stands beside other keywords",
    ),
    (
        r"Pointer '(.*)' does not exist",
        lambda found: f"'$ref' {_value('#' + found[1])}: the schema has no such part",
    ),
    (
        r"Anchor '(.*)' does not exist",
        lambda found: f"'$ref' {_value('#' + found[1])}: the schema has no such '$anchor'",
    ),
    (
        r"Resource '(.*)' is not present in a registry.*",
        lambda found: f"'$ref' {_value(found[1])} leaves the schema, and other documents are not fetched",
    ),
    (
        r"Invalid URI reference '(.*)': (.*)",
        lambda found: f"'$ref' {_value(found[1])} is not a reference: {found[2]}",
    ),
    (
        r"Unknown format: (.*)",
        lambda found: f"'format' {_value(found[1])} is not one of {', '.join(FORMATS)}",
    ),
    (
        r"Unimplemented keys: \[(.*)\]",
        lambda found: f"keywords that no grammar can hold to: {found[1]}",
    ),
    (
        r"oneOf constraints are not supported.*",
        lambda _: "'oneOf' needs schemas of which no value fits two; 'anyOf' allows such values",
    ),
    (
        r"Unsatisfiable schema: Regex is empty: .*",
        lambda _: "no string has the pattern, format, length and values of the schema at once",
    ),
    (r"Unsatisfiable schema: (.*)", lambda found: f"no value fits the schema: {found[1]}"),
    (r"Expected f64 (.*)", lambda found: f"expected a number {found[1]}"),
    (
        r"(.*?)invalid type: (.*), expected ([^,]*?)( at line [0-9]+ column [0-9]+)?",
        lambda found: (
            f"{found[1]}expected {_kind(found[3])}, got {found[2].replace('`', '')}{found[4] or ''}"
        ),
    ),
    (
        r"unknown field `(.*)`, expected one of (.*)",
        lambda found: f"'x-guidance': {_value(found[1])} is not one of {found[2].replace('`', '')}",
    ),
    (
        r'unknown special token: (".*?"); following special tokens are available: .*',
        lambda found: f"the model has no special token {found[1]}",
    ),
    (
        r"regex parse error:\s*\(\?s:\.\{.*decimal literal invalid",
        lambda _: "'minLength' or 'maxLength' is too large",
    ),
    (r'invalid regex ".*" \(in .*?\): (.*)', lambda found: _of_expression(found[1])),
    (r"(lookarounds not supported yet; .*)", lambda found: _of_expression(found[1])),
    (
        r"(.*) \(at \".*\" \(.*\)\)",
        lambda found: found[1].replace(r"found '\n'", "found the end of the line"),
    ),
    (r"panic: .*", lambda _: "the grammar is too large, or of a form that cannot be compiled"),
)
_RULES = [(re.compile(pattern, re.DOTALL), words) for pattern, words in _WORDS]
_LOOK_AROUND = re.compile(r"lookarounds not supported yet; \w+ in regex (.*)", re.DOTALL)
_KINDS = {"usize": "a whole number", "a sequence": "a list", "a map": "an object"}
"""Types of a program, and their names in JSON."""


def _kind(expected: str) -> str:
    """The type of JSON for a type of llguidance."""
    return "an object" if expected.startswith("struct ") else _KINDS.get(expected, expected)


def _of_expression(error: str) -> str:
    """An error in a regular expression."""
    return _LOOK_AROUND.sub(r"look-around, such as a word boundary, is not supported: \1", error)


def plain(error: str) -> str:
    """An error of llguidance in plain words; a line of Lark after the error and a place before the error stay."""
    line = _LINE.search(error)
    text, rest = (error[: line.start()], error[line.start() :]) if line else (error, "")
    place = _PLACE.match(text)
    before = place[0] if place else ""
    text = text.removeprefix(before).removeprefix(_WRAPPED)
    for pattern, words in _RULES:
        if found := pattern.fullmatch(text):
            return before + words(found) + rest
    return before + text + rest


def of_function(error: str) -> str:
    """The error without a line of Lark and its place."""
    return _PLACE.sub("", _LINE.split(error)[0], count=1)
