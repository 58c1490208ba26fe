"""Arguments of a call as compact JSON text, written while they are read.

A writer reads a text that grows, from a position on, and gives what the text adds to the compact text. What the
pieces add up to does not depend on where the text is cut.

1. `CompactObject` reads an object in JSON. The sum is what `bodies.compact` makes of the object, but for keys that
   stand twice: both members stay, and readers of JSON take the last. Raw line breaks in strings become escapes, halves
   of characters and NUL the replacement character, and numbers have Python's digits.
2. `CompactParameters` reads `<parameter=key>` elements, whose values have the types of a schema, each in one piece.

Arguments break off where the text is no JSON, has more than `MOST_LEVELS` levels, or has a number beyond doubles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from ipc.wire.streams import MOST_LEVELS
from workers.generation.formats.bodies import (
    XML_FUNCTION_END,
    XML_PARAMETER,
    XML_PARAMETER_END,
    compact,
    typed_parameter,
)

_MOST_DIGITS = 5000
"""Characters of a number; Python reads integers of fewer digits."""
_MOST_MARK = 600
"""Characters of a mark that opens a parameter, and more."""
_BLANKS = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_LETTERS = re.compile(r"[-+0-9.eE]+")
_HEX = re.compile(r"[0-9a-fA-F]*")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORDS = ("true", "false", "null")
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_VALUE, _FIRST_KEY, _KEY, _COLON, _FIRST_ITEM, _BEHIND = range(6)
"""What comes next: a value, the first key or the end of an object, a key, a colon, the first value or the end of a
list, and behind a value a comma or an end."""


class Writer(Protocol):
    """Writes the arguments of one call.

    `at` is the position up to which the text is read. `is_whole`: the arguments have ended there. `is_broken`: the text
    from there on is no part of arguments.
    """

    at: int
    is_whole: bool
    is_broken: bool

    def write(self, text: str) -> str:
        """What more of the text adds."""

    def close(self) -> str:
        """What the regular end of the region adds, if the region may end the arguments."""


class CompactObject:
    """Reads the object that begins at position `at`."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.is_whole = self.is_broken = False
        self._stack: list[str] = []
        self._next = _VALUE
        self._in_string = self._is_key = False

    def write(self, text: str) -> str:
        """As `Writer`."""
        # PERF: most pieces of arguments are a stretch of one string.
        if self._in_string and (plain := _PLAIN.fullmatch(text, self.at)) is not None:
            self.at = len(text)
            return plain[0]
        parts: list[str] = []
        while not self.is_whole and not self.is_broken:
            if not self._in_string:
                self.at = _BLANKS.match(text, self.at).end()  # type: ignore[union-attr]
            if self.at >= len(text):
                break
            before = self.at, self._in_string
            parts.append(self._string(text) if self._in_string else self._step(text))
            if before == (self.at, self._in_string):
                break
        return "".join(parts)

    def close(self) -> str:
        """An object has an end of its own."""
        return ""

    def _break(self) -> str:
        self.is_broken = True
        return ""

    def _step(self, text: str) -> str:
        """One mark, or one value that is no string; nothing where more text is needed."""
        letter, expected = text[self.at], self._next
        if expected in (_FIRST_KEY, _KEY) and letter == '"':
            return self._open_string(is_key=True)
        if expected == _COLON and letter == ":":
            return self._passed(letter, _VALUE)
        if expected == _BEHIND and letter == ",":
            return self._passed(letter, _KEY if self._stack[-1] == "}" else _VALUE)
        if expected in (_FIRST_KEY, _FIRST_ITEM, _BEHIND) and letter == self._stack[-1]:
            self._stack.pop()
            self.is_whole = not self._stack
            return self._passed(letter, _BEHIND)
        return self._value(text, letter) if expected in (_VALUE, _FIRST_ITEM) else self._break()

    def _passed(self, letter: str, following: int) -> str:
        self.at += 1
        self._next = following
        return letter

    def _value(self, text: str, letter: str) -> str:
        if letter in "{[":
            if len(self._stack) >= MOST_LEVELS:
                return self._break()
            self._stack.append("}" if letter == "{" else "]")
            return self._passed(letter, _FIRST_KEY if letter == "{" else _FIRST_ITEM)
        if not self._stack:
            return self._break()
        if letter == '"':
            return self._open_string(is_key=False)
        if letter in "-0123456789":
            return self._number(text)
        for word in _WORDS:
            part = text[self.at : self.at + len(word)]
            if part == word:
                self.at += len(word)
                self._next = _BEHIND
                return word
            if word.startswith(part):
                return ""
        return self._break()

    def _number(self, text: str) -> str:
        """A number, once something follows."""
        run = _NUMBER_LETTERS.match(text, self.at, self.at + _MOST_DIGITS)
        assert run is not None
        if run.end() == len(text) and len(run[0]) < _MOST_DIGITS:
            return ""
        if not _NUMBER.fullmatch(run[0]):
            return self._break()
        try:
            told = compact(value := json.loads(run[0]))
            float(value)
        except (ValueError, OverflowError):
            return self._break()
        self.at, self._next = run.end(), _BEHIND
        return told

    def _open_string(self, *, is_key: bool) -> str:
        self.at += 1
        self._in_string, self._is_key = True, is_key
        return '"'

    def _string(self, text: str) -> str:
        """A stretch of a string, an escape, or the end of the string."""
        plain = _PLAIN.match(text, self.at)
        if plain is not None:
            self.at = plain.end()
            return plain[0]
        letter = text[self.at]
        if letter == '"':
            self._in_string = False
            return self._passed(letter, _COLON if self._is_key else _BEHIND)
        if letter != "\\":
            self.at += 1
            return _escaped(letter)
        escape = text[self.at + 1 : self.at + 2]
        if escape == "u":
            return self._code(text)
        if escape and escape not in _ESCAPES:
            return self._break()
        self.at += 2 if escape else 0
        return _escaped(_ESCAPES[escape]) if escape else ""

    def _code(self, text: str) -> str:
        """An escape by number, of which two can be one character."""
        digits = _HEX.match(text, self.at + 2, self.at + 6)[0]  # type: ignore[index]
        if len(digits) < 4:
            return "" if self.at + 2 + len(digits) == len(text) else self._break()
        number, length = int(digits, 16), 6
        if 0xD800 <= number < 0xDC00:
            begin = text[self.at + 6 : self.at + 8]
            if "\\u".startswith(begin):
                digits = _HEX.match(text, self.at + 8, self.at + 12)[0]  # type: ignore[index]
                if len(digits) < 4 and self.at + 6 + len(begin) + len(digits) == len(text):
                    return ""
                low = int(digits, 16) if len(digits) == 4 else 0
                if 0xDC00 <= low < 0xE000:
                    number, length = 0x10000 + ((number - 0xD800) << 10) + low - 0xDC00, 12
        self.at += length
        return _escaped(chr(number))


def _escaped(letter: str) -> str:
    """A character within a string of compact JSON."""
    if letter == "\0" or "\ud800" <= letter <= "\udfff":
        return _UNREADABLE
    return json.dumps(letter, ensure_ascii=False)[1:-1]


class CompactParameters:
    """Reads the parameters of a function from position `at` on; `types` are the schemas of the parameters by name."""

    def __init__(self, at: int, types: Mapping[str, Any]) -> None:
        self.at = at
        self.is_whole = self.is_broken = False
        self._types = types
        self._is_first = True
        self._key: str | None = None
        """The name of the parameter that begins at `at`, and has not ended."""
        self._from = self._end_from = at
        self._end: int | None = None

    def write(self, text: str) -> str:
        """As `Writer`."""
        if self._end is None:
            found = text.find(XML_FUNCTION_END, self._end_from)
            self._end = found if found >= 0 else None
            self._end_from = max(self._end_from, len(text) - len(XML_FUNCTION_END) + 1)
        limit = len(text) if self._end is None else self._end
        parts: list[str] = []
        # PERF: no stretch of the text is searched again when the text has grown.
        while not self.is_whole:
            if self._key is None:
                begin = XML_PARAMETER.search(text, self.at, limit)
                if begin is None:
                    self.at = max(self.at, limit - _MOST_MARK)
                    break
                self._key, self.at = begin[1].strip(), begin.end()
                self._from = self.at
            end = text.find(XML_PARAMETER_END, self._from, limit)
            if end < 0:
                self._from = max(self._from, limit - len(XML_PARAMETER_END) + 1)
                break
            value = typed_parameter(text[self.at : end], self._types.get(self._key))
            parts.append(self._member(self._key, value))
            self._key, self.at = None, end + len(XML_PARAMETER_END)
        if self._end is not None and not self.is_whole:
            self.at = self._end + len(XML_FUNCTION_END)
            parts.append(self.close())
        return "".join(parts)

    def close(self) -> str:
        """The end of the function."""
        self.is_whole = True
        return "{}" if self._is_first else "}"

    def _member(self, key: str, value: str) -> str:
        begin, self._is_first = "{" if self._is_first else ",", False
        return f"{begin}{compact(key)}:{value}"
