"""Where a tool call ends, in text that grows.

A region begins with the mark that opened it.

1. `end` says after which character the region is over, as soon as the text tells.
2. `listed` gives the calls of a list one by one, as soon as each is complete: an answer that is cut within a list keeps
   the calls before the cut.
3. `read` gives the other calls of a region that is over, and the text that is no call.

All three say the same for the same text, however the text arrives in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from workers.generation.formats.bodies import Reader, Schemas, read_json
from workers.generation.request import Call

MOST_HEADER = 300
"""Characters between a mark and the arguments."""
_BETWEEN = " \t\r\n,;]"
"""What stands between two calls of a list, and at its end."""
_BRACKET = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'["\\]')
_FIRST_KEY = re.compile(r'\s*(?:\[\s*)?(?:\{\s*(?:"(?P<key>[^"\\]*))?)?')
_HEADER_MARKS = ("[ARGS]", "[CALL_ID]")
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})


class Region(Protocol):
    """One possible tool call."""

    def end(self, text: str) -> int | None:
        """Characters of the region in `text`, which begins with the mark; None while more text is needed."""

    def listed(self, text: str) -> list[Call]:
        """Further calls of a list that are complete, after `end` has seen the text."""

    def read(self, text: str, cut: bool) -> tuple[list[Call], str]:
        """The calls of the whole region that `listed` has not given, and the text that is no call.

        `cut`: the answer ended with its last allowed token, within the region.
        """


Opened = Callable[[str, Schemas], Region]
"""Makes the region that a mark opens."""


class JsonEnd:
    """Finds the end of a JSON object or list from position `at` of a text that grows.

    `items` are begin and end of the objects and lists that a list has so far.
    """

    __slots__ = ("_item", "at", "depth", "in_string", "is_list", "items")

    def __init__(self, at: int) -> None:
        self.at = at
        self.depth = self._item = 0
        self.in_string = False
        self.is_list: bool | None = None
        self.items: list[tuple[int, int]] = []

    def pass_over(self, text: str, limit: int) -> None:
        """Go on up to a position, past the ends of values."""
        while self.advance(text, limit) is not None:
            pass

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
            self._bracket(letter, match.start())
            if self.depth <= 0:
                return self.at
        return None

    def _bracket(self, letter: str, at: int) -> None:
        if self.is_list is None:
            self.is_list = letter == "["
        if letter in "{[":
            self.depth += 1
            if self.depth == 2:
                self._item = at
            return
        self.depth -= 1
        if self.depth == 1 and self.is_list:
            self.items.append((self._item, self.at))
        if self.depth <= 0:
            self.is_list = False


class Listed:
    """Reads the calls of a JSON list one by one, up to the first item that is no call."""

    def __init__(self, schemas: Schemas, *, is_bare: bool) -> None:
        """`is_bare`: each call must name a function of the request."""
        self._schemas, self._is_bare = schemas, is_bare
        self._seen = self.count = self.upto = 0
        self._is_broken = False

    def take(self, text: str, value: JsonEnd) -> list[Call]:
        """The calls among the items of `value` that are new."""
        told: list[Call] = []
        for begin, end in value.items[self._seen :]:
            self._seen += 1
            calls = None if self._is_broken else read_json(text[begin:end], self._schemas)
            if not calls or len(calls) > 1 or (self._is_bare and calls[0].name not in self._schemas):
                self._is_broken = True
                break
            self.upto = end
            told += calls
        self.count += len(told)
        return told

    def left(self, text: str, calls: list[Call] | None) -> tuple[list[Call], str]:
        """What is left of the `calls` of a whole region, and of its text."""
        if calls is not None:
            return calls[self.count :], ""
        return [], text[self.upto :].lstrip(_BETWEEN) if self.upto else text


class Delimited:
    """A call between a mark and a closing mark; with `begins` the body must begin like one of these.

    `json` matches what stands before JSON in a body; closing marks in strings of the JSON are text. `whole` gives the
    beginning of a body that was cut, up to the end of its last call.
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
        whole: Callable[[str], str] = str,
    ) -> None:
        self._opened, self._schemas, self._read, self._whole = opened, schemas, read, whole
        self._closed = re.compile("|".join(map(re.escape, closed)))
        self._longest = max(map(len, closed))
        self._begins = begins
        self._json = re.compile(json)
        self._strings: JsonEnd | None = None
        self._list = Listed(schemas, is_bare=False)
        self._from = len(opened)

    def end(self, text: str) -> int | None:
        """After the closing mark, or at the first character that cannot begin a body."""
        body = text[len(self._opened) : len(self._opened) + MOST_HEADER].lstrip()
        if self._begins and not any(
            body.startswith(begin) or begin.startswith(body) for begin in self._begins
        ):
            return len(text[: len(self._opened) + MOST_HEADER]) - len(body)
        if self._strings is None and (
            begun := self._json.match(text, len(self._opened), len(self._opened) + MOST_HEADER)
        ):
            self._strings = JsonEnd(begun.end())
        while match := self._closed.search(text, self._from):
            if self._strings is not None:
                self._strings.pass_over(text, match.start())
                if self._strings.in_string:
                    self._from = match.end()
                    continue
            return match.end()
        self._from = max(self._from, len(text) - self._longest + 1)
        if self._strings is not None:
            self._strings.pass_over(text, self._from)
        return None

    def listed(self, text: str) -> list[Call]:
        """Calls of a list in JSON."""
        return self._list.take(text, self._strings) if self._strings is not None else []

    def read(self, text: str, cut: bool) -> tuple[list[Call], str]:
        """The calls of the body; a missing closing mark is forgiven at the end of an answer."""
        last = None
        for match in self._closed.finditer(text, len(self._opened)):
            last = match
        if last and last.end() == len(text):
            return self._list.left(text, self._read(text[len(self._opened) : last.start()], self._schemas))
        if self._strings is not None:
            self._strings.pass_over(text, len(text))
        told = self.listed(text)
        body = text[len(self._opened) :]
        whole = self._whole(body) if cut else body
        calls = self._read(whole, self._schemas)
        left = text[len(self._opened) + len(whole) :] if calls else ""
        calls, text = self._list.left(text, calls)
        return told + calls, text or left


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
        self._list = Listed(schemas, is_bare=is_bare)
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

    def listed(self, text: str) -> list[Call]:
        """Calls of a list."""
        return self._list.take(text, self._value) if self._value is not None else []

    def read(self, text: str, cut: bool) -> tuple[list[Call], str]:
        """The calls of the value; those without a mark must name a function of the request."""
        calls = self._read(text[len(self._opened) :], self._schemas)
        if calls and self._is_bare and any(call.name not in self._schemas for call in calls):
            calls = None
        return self._list.left(text, calls)

    def _wrong_key(self, text: str) -> int | None:
        """Where a JSON value shows that it is no call, by its first key."""
        begun = _FIRST_KEY.match(text, len(self._opened))
        assert begun is not None
        key, at = begun["key"], begun.end()
        if key is None:
            return at if at < len(text) else None
        fits = next(
            n for n in range(len(key), -1, -1) if any(known.startswith(key[:n]) for known in _CALL_KEYS)
        )
        if fits < len(key):
            return begun.start("key") + fits
        return None if at == len(text) or (text[at] == '"' and key in _CALL_KEYS) else at
