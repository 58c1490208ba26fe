"""Dates and times of schemas, as patterns of text that validators accept.

llguidance's own `date` has a year 0000 and the 29th of February in each year, and its `time` has a second 60.
`of_grammar` writes a pattern in place of these formats: years 0001 to 9999, seconds 00 to 59, six digits of a fraction
at most, `T` and `Z` in upper case.
"""

from __future__ import annotations

import json
import re
from typing import Any

from workers.generation import grammar_numbers

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
    for begin, end, schema in grammar_numbers.within_lark(text):
        if begin >= done and _write(schema):
            pieces += [text[done:begin], json.dumps(schema)]
            done = end
    return "".join([*pieces, text[done:]])


def _write(schema: Any) -> bool:
    """Write patterns into a schema; returns whether there was a date or a time."""
    found = [part for part in grammar_numbers.parts(schema) if part.get("format") in tuple(_PATTERNS)]
    for part in found:
        pattern = _PATTERNS[part.pop("format")]
        if "pattern" not in part:
            part["pattern"] = pattern
        else:
            inner = part.setdefault("allOf", [])
            if isinstance(inner, list):
                inner.append({"pattern": pattern})
    return bool(found)
