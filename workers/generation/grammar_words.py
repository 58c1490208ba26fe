"""The words for errors of llguidance: those of schemas, without names of the library's own parts.

1. `plain` replaces the errors that speak of registries, biases or doubles. Any other error stays as found.
2. `of_function` leaves out the line and the place of an error in a grammar that no client has written.
"""

from __future__ import annotations

import re
from collections.abc import Callable

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Values of `format` that a grammar can hold to."""
_MOST_VALUE = 200
_LINE = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"at \d+\(\d+\): ")
_WRAPPED = "failed to compile JSON schema: "
_BASE = "json-schema:///"


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
        lambda _: (
            "'oneOf' needs schemas of which no value fits two; 'anyOf', or 'coerce_one_of' in 'x-guidance', "
            "allows such values"
        ),
    ),
    (
        r"Unsatisfiable schema: Regex is empty: .*",
        lambda _: "no string has the pattern, format, length and values of the schema at once",
    ),
    (r"Unsatisfiable schema: (.*)", lambda found: f"no value fits the schema: {found[1]}"),
    (r"Expected f64 (.*)", lambda found: f"expected a number {found[1]}"),
)
_RULES = [(re.compile(pattern, re.DOTALL), words) for pattern, words in _WORDS]


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
