"""Calls that are told while they are written: which text is certain to be one, and the parts that a region tells.

A call is certain once three things stand in the text: what opens a call (a mark, or the beginning of a visible answer),
the name of a function of the request, and the beginning of an object of arguments, `{` and a key or the end of the
object. From there on the text stays a call whatever follows: where its arguments stop being JSON, the call breaks off,
and the text behind is visible.

| body | certain at |
|---|---|
| an object with `name` in front of `arguments` or `parameters`, alone or in a list | the beginning of the arguments |
| a name and an object (Mistral, DeepSeek, Gemma 4, Qwen3-Coder, Harmony) | the beginning of the object |
| `<function=name>` with parameters | the first parameter, or the end of the function |
| another order of keys, arguments in quotes, Gemma's own notation, Python, other functions | the end of the call |

A call whose end the bound on tokens cut off is certain at its name. All of this depends on the text alone.

Arguments are told as compact JSON text. A `Writer` reads a text that grows, from a position on, and gives what the text
adds to the compact text. What the pieces add up to does not depend on where the text is cut.

1. `CompactObject` reads an object in JSON. The sum is what `bodies.compact` makes of the object, but for keys that
   stand twice: both members stay, and readers of JSON take the last. Raw line breaks in strings become escapes, halves
   of characters and NUL the replacement character, and numbers have Python's digits.
2. `CompactParameters` reads `<parameter=key>` elements, whose values have the types of a schema, each in one piece.

Arguments break off where the text is no JSON, has more than `MOST_LEVELS` levels, or has a number beyond doubles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ipc.wire.streams import ARGUMENTS, CALL_CUT, CALL_ENDED, CALLED, MOST_LEVELS, CalledFunction
from workers.generation.formats.bodies import (
    XML_FUNCTION_END,
    XML_PARAMETER,
    XML_PARAMETER_END,
    Schemas,
    compact,
    typed_parameter,
)
from workers.generation.request import Segment

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
            digits = compact(value := json.loads(run[0]))
            float(value)
        except (ValueError, OverflowError):
            return self._break()
        self.at, self._next = run.end(), _BEHIND
        return digits

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


MOST_HEAD = 1200
"""Characters from the beginning of a call to its arguments."""
_OBJECT = r"\s*(?=\{\s*[\"}])"
_KEYS = ("arguments", "parameters")
_OPENED = (
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]{0,128}"\s*,\s*)*(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\\]{1,512})"\s*'
)


OBJECT = re.compile(_OBJECT)
"""What stands between the head of a call and its arguments."""


class Head(NamedTuple):
    """What stands in front of arguments, with a group `name`, and whether parameters in XML follow.

    `certain` matches up to the arguments, `cut` where at least the name is whole.
    """

    certain: re.Pattern[str]
    cut: re.Pattern[str]
    in_xml: bool = False

    def writer(self, at: int, schema: Mapping[str, Any]) -> Writer:
        """Writes the arguments that begin at a position."""
        if not self.in_xml:
            return CompactObject(at)
        properties = schema.get("properties")
        return CompactParameters(at, properties if isinstance(properties, Mapping) else {})


def named(before: str, cut: str) -> Head:
    """A head with the name outside of JSON: `before` matches the head, `cut` what proves that the name is whole."""
    return Head(re.compile(before + _OBJECT), re.compile(before + cut, re.DOTALL))


def in_xml(before: str) -> Head:
    """A head in front of parameters."""
    return Head(re.compile(before + r"(?=\s*(?:<parameter=|</function>))"), re.compile(before), in_xml=True)


def whole_only(cut: str) -> Head:
    """A head in front of arguments that only the whole call tells."""
    return Head(re.compile("(?!)"), re.compile(cut))


ITEM = Head(
    re.compile(_OPENED + r',\s*"(?:arguments|parameters)"\s*:' + _OBJECT),
    re.compile(_OPENED + r'(?:,\s*(?:"(?P<key>[a-z]*)(?P<behind>"\s*(?::.*)?)?)?)?\Z', re.DOTALL),
)
"""An object with a name and arguments."""


class Calls:
    """The calls of one region, as they are written. `at` is where the text behind the last call begins, 0 without any.

    `count` is the number of calls that were told. `is_open`: one of them goes on.
    """

    def __init__(self, schemas: Schemas, prefix: str = "call-") -> None:
        self._schemas, self._prefix = schemas, prefix
        self._writer: Writer | None = None
        self.count = self.at = 0
        self.broken_at: int | None = None
        """Where the text has stopped being a call."""

    @property
    def is_open(self) -> bool:
        """Whether a call has begun that has not ended."""
        return self._writer is not None

    def begin(self, text: str, begin: int, heads: Sequence[Head]) -> list[Segment]:
        """The beginning of the call whose text begins at a position, if the call is certain already."""
        for head in heads:
            match = head.certain.match(text, begin, begin + MOST_HEAD)
            if match is not None and (name := match["name"].strip()) in self._schemas:
                self._writer = head.writer(match.end(), self._schemas[name])
                return [self._begun(name)]
        return []

    def begin_named(self, text: str, name: str) -> list[Segment]:
        """The beginning of a call whose name stands elsewhere, if the text begins with its arguments."""
        match = OBJECT.match(text) if name in self._schemas else None
        if match is None:
            return []
        self._writer = CompactObject(match.end())
        return [self._begun(name)]

    def cut_named(self, name: str) -> list[Segment]:
        """A call whose name stands elsewhere, and whose text was cut off before its arguments."""
        return [self._begun(name), self._ended(0, CALL_CUT)] if name in self._schemas else []

    def go_on(self, text: str) -> list[Segment]:
        """What more of the text adds to the call that has begun."""
        writer = self._writer
        if writer is None:
            return []
        parts = _pieces(writer.write(text))
        if writer.is_whole:
            parts.append(self._ended(writer.at, CALL_ENDED))
        elif writer.is_broken:
            self.broken_at = writer.at
            parts.append(self._ended(writer.at, CALL_CUT))
        return parts

    def close(self, length: int, *, cut: bool) -> list[Segment]:
        """The region is over after `length` characters, and so is the call that goes on; `cut` within the region."""
        writer = self._writer
        if writer is None:
            return []
        parts = [] if cut else _pieces(writer.close())
        return [*parts, self._ended(length, CALL_ENDED if writer.is_whole else CALL_CUT)]

    def cut(self, text: str, begin: int, heads: Sequence[Head]) -> list[Segment]:
        """The call whose text begins at a position and was cut off before it was certain, if its name is known."""
        for head in heads:
            match = head.cut.match(text, begin, begin + MOST_HEAD if head is not ITEM else len(text))
            if match is None or (name := match["name"].strip()) not in self._schemas:
                continue
            if head is not ITEM or _may_be_arguments(match["key"], match["behind"]):
                return [self._begun(name), self._ended(len(text), CALL_CUT)]
        return []

    def _begun(self, name: str) -> Segment:
        self.count += 1
        return Segment(CALLED, call=CalledFunction(name, self._prefix))

    def _ended(self, at: int, kind: int) -> Segment:
        self._writer, self.at = None, at
        return Segment(kind)


def _pieces(text: str) -> list[Segment]:
    return [Segment(ARGUMENTS, text)] if text else []


def _may_be_arguments(key: str | None, behind: str | None) -> bool:
    """Whether the key behind a name is that of arguments, or may become it."""
    if key is None:
        return True
    return key in _KEYS if behind else any(known.startswith(key) for known in _KEYS)
