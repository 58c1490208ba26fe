"""Where a tool call ends, in text that grows.

A region begins with the mark that opened it. `end` says after which character the region is over, as soon as the text
tells, and always the same for the same text, however the text arrives in pieces. `calls` reads a region that is over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from ipc.wire.generation import CalledFunction
from workers.generation.formats.bodies import Reader, Schemas, read_json

MOST_HEADER = 300
"""Characters between a mark and the arguments."""
_BRACKET = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'["\\]')
_FIRST_KEY = re.compile(r'\s*(?:\[\s*)?\{\s*"([^"\\]*)"')
_FIRST_KEY_BEGUN = re.compile(r'\s*(?:\[\s*)?(?:\{\s*(?:"[^"\\]*)?)?')
_HEADER_MARKS = ("[ARGS]", "[CALL_ID]")
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})


class Region(Protocol):
    """One possible tool call."""

    def end(self, text: str) -> int | None:
        """Characters of the region in `text`, which begins with the mark; None while more text is needed."""

    def calls(self, text: str) -> list[CalledFunction] | None:
        """The calls of the whole region; None if the text is none."""


Opened = Callable[[str, Schemas], Region]
"""Makes the region that a mark opens."""


class JsonEnd:
    """Finds the end of a JSON object or list from position `at` of a text that grows."""

    __slots__ = ("at", "depth", "in_string")

    def __init__(self, at: int) -> None:
        self.at = at
        self.depth = 0
        self.in_string = False

    def advance(self, text: str, limit: int | None = None) -> int | None:
        """The position after the value, or None if the text, up to `limit`, ends before."""
        limit = len(text) if limit is None else limit
        while self.at < limit:
            match = (_IN_STRING if self.in_string else _BRACKET).search(text, self.at, limit)
            if match is None:
                self.at = limit
                return None
            letter = match[0]
            if letter == "\\":
                if match.end() >= limit:
                    self.at = match.start()
                    return None
                self.at = match.end() + 1
                continue
            self.at = match.end()
            if letter == '"':
                self.in_string = not self.in_string
                continue
            self.depth += 1 if letter in "{[" else -1
            if self.depth <= 0:
                return self.at
        return None


class Delimited:
    """A call between a mark and a closing mark; with `begins` the body must begin like one of these.

    `json` matches what stands before JSON in a body; closing marks in strings of the JSON are text.
    """

    def __init__(
        self,
        opened: str,
        schemas: Schemas,
        *,
        closed: Sequence[str],
        read: Reader,
        begins: Sequence[str] = ("{", "["),
        json: str = "",
    ) -> None:
        self._opened, self._schemas, self._read = opened, schemas, read
        self._closed = re.compile("|".join(map(re.escape, closed)))
        self._longest = max(map(len, closed))
        self._begins = begins
        self._json = re.compile(json)
        self._strings: JsonEnd | None = None
        self._from = len(opened)

    def end(self, text: str) -> int | None:
        """After the closing mark, or at the first character that cannot begin a body."""
        body = text[len(self._opened) : len(self._opened) + MOST_HEADER].lstrip()
        if self._begins and not any(
            body.startswith(begin) or begin.startswith(body) for begin in self._begins
        ):
            return len(text[: len(self._opened) + MOST_HEADER]) - len(body)
        while match := self._closed.search(text, self._from):
            if self._strings is None and (begun := self._json.match(text, len(self._opened))):
                self._strings = JsonEnd(begun.end())
            if self._strings is not None:
                self._strings.advance(text, match.start())
                if self._strings.in_string:
                    self._from = match.end()
                    continue
            return match.end()
        self._from = max(self._from, len(text) - self._longest + 1)
        return None

    def calls(self, text: str) -> list[CalledFunction] | None:
        """The calls of the body; a missing closing mark is forgiven at the end of an answer."""
        last = None
        for match in self._closed.finditer(text, len(self._opened)):
            last = match
        body = text[len(self._opened) : last.start() if last and last.end() == len(text) else len(text)]
        return self._read(body, self._schemas)


class JsonValue:
    """A call that ends with its JSON value; `header` matches what may stand between the mark and the value."""

    def __init__(
        self,
        opened: str,
        schemas: Schemas,
        *,
        read: Reader = read_json,
        header: str = "",
        is_bare: bool = False,
    ) -> None:
        self._opened, self._schemas, self._read = opened, schemas, read
        self._header = re.compile(rf"\s*(?:{header})?\s*")
        self._is_bare = is_bare
        self._value: JsonEnd | None = None

    def end(self, text: str) -> int | None:
        """After the value, or at the first character that cannot belong to a call."""
        if self._value is None:
            begin, most = len(self._opened), len(self._opened) + MOST_HEADER
            match = self._header.match(text, begin, most)
            at = match.end() if match else begin
            if at >= min(len(text), most):
                return most if at >= most else None
            if text[at] == "[" and any(mark.startswith(text[at:]) for mark in _HEADER_MARKS):
                return None
            if text[at] not in "{[":
                return at
            self._value = JsonEnd(at)
        if self._is_bare and (broken := self._wrong_key(text)) is not None:
            return broken
        return self._value.advance(text)

    def calls(self, text: str) -> list[CalledFunction] | None:
        """The calls of the value; those without a mark must name a function of the request."""
        calls = self._read(text[len(self._opened) :], self._schemas)
        if calls and self._is_bare and any(call.name not in self._schemas for call in calls):
            return None
        return calls

    def _wrong_key(self, text: str) -> int | None:
        """Where a JSON value shows that it is no call, by its first key."""
        begin = len(self._opened)
        key = _FIRST_KEY.match(text, begin)
        if key is not None:
            return None if key[1] in _CALL_KEYS else key.end()
        begun = _FIRST_KEY_BEGUN.match(text, begin)
        at = begun.end() if begun else begin
        return at if at < len(text) else None
