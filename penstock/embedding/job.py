"""One run of `penstock embed`.

1. Batches of lines go to `/v1/encode/{model}`, some at a time; the answers are written in the order of the lines.
2. A request that the server refuses for one of its texts is split until the text stands alone: the error of its line.
3. Every few seconds the rows are synced and noted, so that the same command can go on after an interruption.

Memory holds the batches on their way and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from penstock.embedding.lines import Batch, Lines
from penstock.embedding.output import Output
from penstock.http_client import Asker

SAVE_EVERY_S = 2.0
TELL_EVERY_S = 10.0
"""Pause between two lines of progress where nobody looks."""
_SPLIT = (400, 413, 422, 500)
"""Statuses of answers whose cause may be one text."""
_HEADERS = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


class Stopped(Exception):
    """The run cannot go on; what is done is kept."""


@dataclass(slots=True)
class _Found:
    """The vectors of some texts by their place, and the errors of the others."""

    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Job:
    """One run."""

    def __init__(self, options: argparse.Namespace, lines: Lines, output: Output) -> None:
        self._options, self._lines, self._output = options, lines, output
        self._path = f"/v1/encode/{quote(options.model)}"
        self._params: dict[str, Any] = {
            "output_types": ["dense"],
            "output_dtype": options.dtype,
            "is_query": options.query,
            "item_errors": True,
            **({"instruction": options.instruction} if options.instruction else {}),
            **({"options": {"dimensions": options.dimensions}} if options.dimensions else {}),
        }
        self._shown = _Shown()
        self._saved = time.monotonic()

    async def run(self, asker: Asker) -> None:
        """Send, receive and write until the input ends. Raises `Stopped`, `BadInput`, `Unreachable`."""
        done = self._output.progress
        self._lines.skip(done.rows, done.offset, done.digest)
        self._shown.begin(done.rows)
        waiting: deque[tuple[Batch, asyncio.Task[_Found]]] = deque()
        turns = asyncio.Semaphore(self._options.in_flight)
        written: Batch | None = None
        try:
            async with asker, asyncio.TaskGroup() as group:
                for batch in self._lines.batches(self._options.batch):
                    waiting.append((batch, group.create_task(self._vectors(asker, turns, batch))))
                    if len(waiting) > 2 * self._options.in_flight:
                        written = await self._write(*waiting.popleft())
                while waiting:
                    written = await self._write(*waiting.popleft())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._shown.end()
            if written is not None:
                self._output.save(written.end, written.digest)
        self._output.finish()

    async def _write(self, batch: Batch, task: asyncio.Task[_Found]) -> Batch:
        """Append the rows of one batch; tell its errors."""
        found = await task
        refused = [message for place, message in found.errors.items() if place not in batch.errors]
        if len(refused) > 1 and len(found.errors) == len(batch.texts) and not self._output.progress.width:
            raise Stopped(f"the server took no text of the first {len(batch.texts)} lines: {refused[0]}")
        for place, message in sorted(found.errors.items()):
            self._shown.error(batch.first + place + 1, message)
        rows = [found.vectors[place] for place in sorted(found.vectors)]
        try:
            vectors = np.stack(rows) if rows else None
            self._output.append(vectors, len(batch.texts), sorted(found.errors))
        except ValueError as error:
            raise Stopped(f"vectors of different widths: {error}") from error
        progress = self._output.progress
        if len(progress.failed) > self._options.max_errors:
            raise Stopped(f"more than --max-errors {self._options.max_errors} lines have no vector")
        self._shown.done(progress.rows)
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self._output.save(batch.end, batch.digest)
            self._saved = time.monotonic()
        return batch

    async def _vectors(self, asker: Asker, turns: asyncio.Semaphore, batch: Batch) -> _Found:
        found = _Found(errors=dict(batch.errors))
        texts = [(place, text) for place, text in enumerate(batch.texts) if text is not None]
        async with turns:
            await self._ask(asker, texts, found)
        return found

    async def _ask(self, asker: Asker, texts: list[tuple[int, str]], found: _Found) -> None:
        """Ask for vectors; a request that is refused for one of its texts is split."""
        if not texts:
            return
        body = msgspec.msgpack.encode(
            {"items": [{"text": text} for _, text in texts], "params": self._params}
        )
        reply = await asker.post_until_answered(self._path, body, _HEADERS, self._options.tries)
        if reply.status == 200:
            _read(reply.body, [place for place, _ in texts], found)
        elif reply.status not in _SPLIT:
            raise Stopped(f"the server answered {reply.message}")
        elif len(texts) == 1:
            found.errors[texts[0][0]] = reply.message
        else:
            half = len(texts) // 2
            await self._ask(asker, texts[:half], found)
            await self._ask(asker, texts[half:], found)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors of a group."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _read(body: bytes, places: list[int], found: _Found) -> None:
    """Take the items of an answer apart. Raises `Stopped` for an answer of another form."""
    try:
        items = msgspec.msgpack.decode(body)["items"]
        if len(items) != len(places):
            raise ValueError(f"{len(items)} items for {len(places)} texts")
        for place, item in zip(places, items, strict=True):
            if error := item.get("error"):
                found.errors[place] = f"{error['code']}: {error['message']}"
            else:
                array = item["dense"]["values"]
                found.vectors[place] = np.frombuffer(array[b"data"], array[b"type"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Stopped(f"the server's answer cannot be read: {type(error).__name__}: {error}") from error


class _Shown:
    """Progress on standard error: one line that moves on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._moves = sys.stderr.isatty()
        self._began = self._told = 0.0
        self._first = self._open = 0

    def begin(self, rows: int) -> None:
        """`rows` are done already."""
        self._first, self._began, self._told = rows, time.monotonic(), time.monotonic()
        if rows:
            print(f"penstock: {rows} lines are done already", file=sys.stderr)

    def done(self, rows: int) -> None:
        """So many rows are done now."""
        now = time.monotonic()
        if not self._moves and now - self._told < TELL_EVERY_S:
            return
        self._told = now
        rate = (rows - self._first) / max(1e-9, now - self._began)
        text = f"{rows:,} lines, {rate:,.0f} a second"
        if self._moves:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._open = 1
        else:
            print(text, file=sys.stderr)

    def error(self, line: int, message: str) -> None:
        """A line has no vector."""
        self.end()
        print(f"line {line}: {message}", file=sys.stderr)

    def end(self) -> None:
        """End the line that moves."""
        if self._open:
            sys.stderr.write("\n")
            self._open = 0
