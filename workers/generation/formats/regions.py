"""Where a tool call ends, in text that grows.

A region begins with the mark that opened it.

1. `end` says after which character the region is over, as soon as the text tells.
2. `told` gives the parts of calls as they are written (`written`), and the calls of a list one by one.
3. `read` gives the other calls of a region that is over, and the text that is no call.

All three say the same for the same text, however the text arrives in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from workers.generation.formats.bodies import Reader, Schemas, read_json
from workers.generation.formats.written import ITEM, Calls, Head
from workers.generation.request import Segment

MOST_HEADER = 300
"""Characters between a mark and the arguments."""
_BETWEEN = " \t\r\n,;]"
"""What stands between two calls of a list, and at its end."""
_TAIL = " \t\r\n,;}]`"
"""What ends a call behind its arguments."""
_BEHIND_CALL = re.compile(r"[\s,;}]*")
_BRACKET = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'["\\]')
_FIRST_KEY = re.compile(r'\s*(?:\[\s*)?(?:\{\s*(?:"(?P<key>[^"\\]*))?)?')
_HEADER_MARKS = ("[ARGS]", "[CALL_ID]")
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})


class Region(Protocol):
    """One possible tool call."""

    def end(self, text: str) -> int | None:
        """Characters of the region in `text`, which begins with the mark; None while more text is needed."""

    def told(self, text: str) -> list[Segment]:
        """Further parts of calls, after `end` has seen the text."""

    @property
    def broken_at(self) -> int | None:
        """Where the text has stopped being a call, if a call that was told breaks off. The region is over there."""

    @property
    def closed(self) -> Sequence[str]:
        """Marks that close the region."""

    def read(self, text: str, cut: bool) -> tuple[list[Segment], str]:
        """The parts of calls of the whole region that `told` has not given, and the text that is no call.

        `cut`: the answer ended with its last allowed token, within the region.
        """


Opened = Callable[[str, Schemas], Region]
"""Makes the region that a mark opens."""


class JsonEnd:
    """Finds the end of a JSON object or list from position `at` of a text that grows.

    `items` are begin and end of the objects and lists that a list has so far, `item` is the beginning of one that goes
    on. `is_over`: the value has ended.
    """

    __slots__ = ("at", "depth", "in_string", "is_list", "is_over", "item", "items")

    def __init__(self, at: int) -> None:
        self.at = at
        self.depth = self.item = 0
        self.in_string = self.is_over = False
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
                self.item = at
            return
        self.depth -= 1
        if self.depth == 1 and self.is_list and not self.is_over:
            self.items.append((self.item, self.at))
        self.is_over |= self.depth <= 0


class Listed:
    """Tells the calls of a region in their order: as they are written where that is possible, else when each is whole.

    A list is read up to the first item that is no call.
    """

    def __init__(self, schemas: Schemas, heads: Sequence[Head], *, is_bare: bool) -> None:
        """`heads` stand before a call without a list. `is_bare`: each call must name a function of the request."""
        self._schemas, self._heads, self._is_bare = schemas, heads, is_bare
        self._calls = Calls(schemas)
        self._seen = 0
        self._is_broken = False

    @property
    def broken_at(self) -> int | None:
        """As that of a `Region`."""
        return self._calls.broken_at

    @property
    def is_open(self) -> bool:
        """Whether a call that was told goes on."""
        return self._calls.is_open

    def take(self, text: str, begin: int, value: JsonEnd | None, *, often: bool = False) -> list[Segment]:
        """What is new of the body that begins at a position, whose JSON `value` has passed over.

        `often`: calls may follow each other without a list.
        """
        if value is not None and value.is_list:
            return self._items(text, value)
        calls, segments = self._calls, list[Segment]()
        while self.broken_at is None and (often or calls.is_open or not calls.count):
            if not calls.is_open:
                heads = [head for head in self._heads if head.in_xml is (value is None)]
                place = _BEHIND_CALL.match(text, calls.at).end() if calls.count else begin  # type: ignore[union-attr]
                begun = calls.begin(text, place, heads)
                if not begun:
                    break
                segments += begun
            segments += calls.go_on(text)
            if calls.is_open:
                break
        return segments

    def _items(self, text: str, value: JsonEnd) -> list[Segment]:
        segments: list[Segment] = []
        for begin, end in value.items[self._seen :]:
            if self._is_broken or self.broken_at is not None:
                return segments
            segments += self._item(text, begin, end)
        if value.depth > 1 and not (value.is_over or self._is_broken or self.broken_at is not None):
            segments += self._grown(text, value.item)
        return segments

    def _grown(self, text: str, begin: int) -> list[Segment]:
        """More of the item that begins at a position."""
        calls = self._calls
        segments = [] if calls.is_open or calls.at > begin else calls.begin(text, begin, (ITEM,))
        return segments + calls.go_on(text)

    def _item(self, text: str, begin: int, end: int) -> list[Segment]:
        """An item that is complete."""
        segments, calls = self._grown(text, begin), self._calls
        if self.broken_at is not None:
            return segments
        self._seen += 1
        if calls.at <= begin:
            whole = read_json(text[begin:end], self._schemas)
            if not whole or len(whole) > 1 or (self._is_bare and whole[0].name not in self._schemas):
                self._is_broken = True
                return segments
            segments += whole[0].segments()
            calls.count += 1
        calls.at = end
        return segments

    def cut(self, text: str, begin: int, value: JsonEnd | None) -> list[Segment]:
        """The call at the end of a text that was cut off: the one that goes on, or one whose name is known."""
        calls = self._calls
        if calls.is_open:
            return calls.close(len(text), cut=True)
        if value is None or not value.is_list:
            return calls.cut(text, max(begin, calls.at), self._heads)
        is_open = value.depth > 1 and not value.is_over and calls.at <= value.item
        return calls.cut(text, value.item, (ITEM,)) if is_open else []

    def left(
        self, text: str, body: str, read: Reader, *, is_over: bool, closed: Sequence[str] = ()
    ) -> tuple[list[Segment], str]:
        """What is left of the calls of a whole region that was not cut, and of its text.

        `body` is what `read` reads. `is_over`: the region has its end, and text behind a call belongs to the call. So
        does the beginning of one of the marks `closed`.
        """
        calls = self._calls
        segments = calls.close(len(text), cut=False)
        if calls.count and not self._is_broken and not (self._heads and self._heads[0].in_xml):
            rest = text[calls.at :].lstrip(_TAIL)
            return segments, "" if is_over or any(mark.startswith(rest) for mark in closed) else rest
        whole = read(body, self._schemas)
        if whole and self._is_bare and any(call.name not in self._schemas for call in whole):
            whole = None
        if whole is None:
            return segments, text[calls.at :].lstrip(_BETWEEN) if calls.at else text
        return segments + [part for call in whole[calls.count :] for part in call.segments()], ""


class Delimited:
    """A call between a mark and a closing mark; with `begins` the body must begin like one of these.

    `json` matches what stands before JSON in a body; closing marks in strings of the JSON are text. `whole` gives the
    beginning of a body that was cut, up to the end of its last call. `heads` stand before the arguments of a call.
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
        heads: Sequence[Head] = (ITEM,),
    ) -> None:
        self._opened, self._schemas, self._read, self._whole = opened, schemas, read, whole
        self.closed = closed
        self._closed = re.compile("|".join(map(re.escape, closed)))
        self._longest = max(map(len, closed))
        self._begins = tuple(begins)
        self._json = re.compile(json)
        self._strings: JsonEnd | None = None
        self._list = Listed(schemas, heads, is_bare=False)
        self._from = len(opened)
        self._body_end: int | None = None

    @property
    def broken_at(self) -> int | None:
        """As `Region`."""
        return self._list.broken_at

    def end(self, text: str) -> int | None:
        """After the closing mark, or at the first character that cannot begin a body."""
        if self._begins:
            body = text[len(self._opened) : len(self._opened) + MOST_HEADER].lstrip()
            if body.startswith(self._begins):
                self._begins = ()
            elif not any(begin.startswith(body) for begin in self._begins):
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
            self._body_end = match.start()
            return match.end()
        self._from = max(self._from, len(text) - self._longest + 1)
        if self._strings is not None:
            self._strings.pass_over(text, self._from)
        return None

    def told(self, text: str) -> list[Segment]:
        """As `Region`."""
        if self._strings is None and self._body_end is not None:
            text = text[: self._body_end]
        return self._list.take(text, len(self._opened), self._strings, often=True)

    def read(self, text: str, cut: bool) -> tuple[list[Segment], str]:
        """The calls of the body; a missing closing mark is forgiven at the end of an answer."""
        begin = len(self._opened)
        if self._body_end is not None:
            return self._list.left(text, text[begin : self._body_end], self._read, is_over=True)
        if self._strings is not None:
            self._strings.pass_over(text, len(text))
        segments = self.told(text)
        if self.broken_at is not None or not cut:
            parts, left = self._list.left(text, text[begin:], self._read, is_over=False, closed=self.closed)
            return segments + parts, left
        if self._list.is_open:
            return segments + self._list.cut(text, begin, self._strings), ""
        body = text[begin:]
        whole = self._whole(body)
        # NOTE: calls in JSON are told one by one, so that only other notations have calls in front of the last one.
        has_others = self._strings is None and self._whole is not str
        before, left = (
            self._list.left(text, whole, self._read, is_over=True) if has_others and whole else ([], "")
        )
        parts = self._list.cut(text, begin + len(whole) if has_others else begin, self._strings)
        if parts:
            return segments + before + parts, ""
        if has_others and whole:
            return segments + before, left or text[begin + len(whole) :]
        parts, left = self._list.left(text, body, self._read, is_over=False, closed=self.closed)
        return segments + parts, left


class JsonValue:
    """A call that ends with its JSON value; `header` matches what may stand between the mark and the value."""

    closed: Sequence[str] = ()

    def __init__(
        self,
        opened: str,
        schemas: Schemas,
        *,
        read: Reader = read_json,
        header: str = "",
        is_bare: bool = False,
        heads: Sequence[Head] = (ITEM,),
    ) -> None:
        self._opened, self._schemas, self._read = opened, schemas, read
        self._header = re.compile(rf"\s*(?:{header})?\s*")
        self._is_bare = is_bare
        self._list = Listed(schemas, heads, is_bare=is_bare)
        self._value: JsonEnd | None = None

    @property
    def broken_at(self) -> int | None:
        """As `Region`."""
        return self._list.broken_at

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

    def told(self, text: str) -> list[Segment]:
        """As `Region`."""
        return self._list.take(text, len(self._opened), self._value) if self._value is not None else []

    def read(self, text: str, cut: bool) -> tuple[list[Segment], str]:
        """The calls of the value; those without a mark must name a function of the request."""
        begin, is_over = len(self._opened), self._value is not None and self._value.is_over
        if cut and not is_over and (parts := self._list.cut(text, begin, self._value)):
            return parts, ""
        return self._list.left(text, text[begin:], self._read, is_over=is_over)

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
