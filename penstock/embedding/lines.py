"""Texts out of a file of JSON lines, in windows, with a digest of all that was read.

A line is an object with the text in one field, or a JSON string. The digest proves, when a run is resumed, that the
lines before are still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

MAX_LINE_NBYTES = 64 << 20
MAX_WINDOW_NBYTES = 16 << 20
"""A window ends before its lines have more bytes, so that memory stays bounded where texts are long."""
MAX_REQUEST_CHARACTERS = 4 << 20
"""The same for the texts of a request."""
LARGE_REQUEST_CHARACTERS, LEAST_TEXTS = 64 << 10, 16
"""A request of long texts ends with so many characters, and not before so many texts: each is about equal work."""
_CHUNK_NBYTES = 1 << 20


_BOM = b"\xef\xbb\xbf"
_OTHERS = {
    b"\x1f\x8b": "compressed with gzip: give `gzip -dc IN | penstock embed - OUT`",
    b"\xff\xfe": "in UTF-16, expected UTF-8",
    b"\xfe\xff": "in UTF-16, expected UTF-8",
    b"PAR1": "a Parquet file, expected a JSON object or string a line",
}
"""First bytes of files that are no JSON lines, and what to say of such a file."""


class BadInput(Exception):
    """The input cannot be read on."""


class ChangedInput(BadInput):
    """The input has changed since an earlier run, so that run cannot go on."""


Text = tuple[int, str]
"""A text with its place in its window."""


@dataclass(slots=True)
class Window:
    """Consecutive lines. `texts` has None for a line without a text, whose reason is in `errors` by its place.

    `first` is the number of the first line, from 0. The lines are bytes `begin` to `end` of the input, and `digest` is
    that of the input up to there.
    """

    first: int
    begin: int
    texts: list[str | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    end: int = 0
    digest: str = ""

    def requests(self, size: int) -> Iterator[list[Text]]:
        """The texts, longest first, at most `size` together: a batch of equal lengths costs the model least."""
        texts = [(place, text) for place, text in enumerate(self.texts) if text is not None]
        texts.sort(key=lambda text: len(text[1]), reverse=True)
        request, characters = list[Text](), 0
        for place, text in texts:
            total = characters + len(text)
            large = total > LARGE_REQUEST_CHARACTERS and len(request) >= LEAST_TEXTS
            if request and (large or len(request) == size or total > MAX_REQUEST_CHARACTERS):
                yield request
                request, characters = [], 0
            request.append((place, text))
            characters += len(text)
        if request:
            yield request


class Lines:
    """The lines of one input from its beginning, or from where an earlier run stopped."""

    def __init__(self, source: BinaryIO, field: str) -> None:
        self._source, self._field = source, field
        self._hash = hashlib.sha256()
        self.offset = 0
        self.row = 0

    def skip(self, row: int, offset: int, digest: str) -> None:
        """Go behind the first `row` lines. Raises `ChangedInput` where these are not the lines of `digest` any more."""
        chunk = b"\n"
        while self.offset < offset:
            chunk = self._source.read(min(_CHUNK_NBYTES, offset - self.offset))
            if not chunk:
                break
            self._take(chunk)
        same = self.offset == offset and (not offset or self._hash.hexdigest() == digest)
        # NOTE: a last line without an end may have gone on since.
        if not same or (not chunk.endswith(b"\n") and self._source.read(1)):
            raise ChangedInput("the lines that are done have changed since; --restart begins anew")
        self.row = row

    def windows(self, size: int) -> Iterator[Window]:
        """The rest of the input, `size` lines at a time.

        Raises `BadInput` for a line that is too long, and for a file that is no JSON lines from its first bytes on.
        """
        window = Window(self.row, self.offset)
        while line := self._source.readline(MAX_LINE_NBYTES + 1):
            if len(line) > MAX_LINE_NBYTES:
                raise BadInput(f"line {self.row + 1} is longer than {MAX_LINE_NBYTES} bytes")
            if not self.offset:
                _refuse_others(line)
            if window.texts and self.offset - window.begin + len(line) > MAX_WINDOW_NBYTES:
                yield self._ended(window)
                window = Window(self.row, self.offset)
            text = line if self.offset else line.removeprefix(_BOM)
            self._take(line)
            self._add(window, text)
            self.row += 1
            if len(window.texts) == size:
                yield self._ended(window)
                window = Window(self.row, self.offset)
        if window.texts:
            yield self._ended(window)

    def _take(self, data: bytes) -> None:
        self._hash.update(data)
        self.offset += len(data)

    def _ended(self, window: Window) -> Window:
        window.end, window.digest = self.offset, self._hash.hexdigest()
        return window

    def _add(self, window: Window, line: bytes) -> None:
        text = self._text(line)
        if isinstance(text, ValueError):
            window.errors[len(window.texts)] = str(text)
            window.texts.append(None)
        else:
            window.texts.append(text)

    def _text(self, line: bytes) -> str | ValueError:
        if not line.strip():
            return ValueError("the line is empty")
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return ValueError(f"not JSON: {error}")
        if isinstance(value, dict):
            if self._field not in value:
                return ValueError(f"the field {self._field!r} is missing")
            value = value[self._field]
        if not isinstance(value, str):
            return ValueError(f"the field {self._field!r} holds no text")
        return value


def _refuse_others(line: bytes) -> None:
    other = next((said for first, said in _OTHERS.items() if line.startswith(first)), None)
    if other is not None:
        raise BadInput(f"the input is {other}")
