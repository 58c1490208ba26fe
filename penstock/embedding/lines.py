"""Texts out of a file of JSON lines, in batches, with a digest of all that was read.

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
MAX_BATCH_NBYTES = 4 << 20
"""A batch ends before its lines have more bytes, so that memory stays bounded where texts are long."""
_CHUNK_NBYTES = 1 << 20


class BadInput(Exception):
    """The input cannot be read on."""


@dataclass(slots=True)
class Batch:
    """Consecutive lines. `texts` has None for a line without a text, whose reason is in `errors` by its place.

    `first` is the number of the first line, from 0; `end` and `digest` are those of the input after the last line.
    """

    first: int
    texts: list[str | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    end: int = 0
    digest: str = ""


class Lines:
    """The lines of one input from its beginning, or from where an earlier run stopped."""

    def __init__(self, source: BinaryIO, field: str) -> None:
        self._source, self._field = source, field
        self._hash = hashlib.sha256()
        self.offset = 0
        self.row = 0

    def skip(self, row: int, offset: int, digest: str) -> None:
        """Go behind the first `row` lines. Raises `BadInput` where these are not the lines of `digest` any more."""
        while self.offset < offset:
            chunk = self._source.read(min(_CHUNK_NBYTES, offset - self.offset))
            if not chunk:
                break
            self._take(chunk)
        if self.offset != offset or (offset and self._hash.hexdigest() != digest):
            raise BadInput("the lines that are done have changed since; --restart begins anew")
        self.row = row

    def batches(self, size: int) -> Iterator[Batch]:
        """The rest of the input, `size` lines at a time. Raises `BadInput` for a line that is too long."""
        batch, nbytes = Batch(self.row), 0
        while line := self._source.readline(MAX_LINE_NBYTES + 1):
            if len(line) > MAX_LINE_NBYTES:
                raise BadInput(f"line {self.row + 1} is longer than {MAX_LINE_NBYTES} bytes")
            if batch.texts and nbytes + len(line) > MAX_BATCH_NBYTES:
                yield self._ended(batch)
                batch, nbytes = Batch(self.row), 0
            self._take(line)
            self._add(batch, line)
            self.row += 1
            nbytes += len(line)
            if len(batch.texts) == size:
                yield self._ended(batch)
                batch, nbytes = Batch(self.row), 0
        if batch.texts:
            yield self._ended(batch)

    def _take(self, data: bytes) -> None:
        self._hash.update(data)
        self.offset += len(data)

    def _ended(self, batch: Batch) -> Batch:
        batch.end, batch.digest = self.offset, self._hash.hexdigest()
        return batch

    def _add(self, batch: Batch, line: bytes) -> None:
        text = self._text(line)
        if isinstance(text, ValueError):
            batch.errors[len(batch.texts)] = str(text)
            batch.texts.append(None)
        else:
            batch.texts.append(text)

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
