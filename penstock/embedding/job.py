"""One run of `penstock embed`.

1. The input is read in windows of some requests. The texts of a window are sorted by length, so that the texts of a
   request, and of a batch of the model, are about equally long.
2. The requests go to `/v1/encode/{model}`, some at a time. While the last ones of a window are answered, those of the
   next window are sent. The vectors of a whole window are written in the order of the lines.
3. A request that the server refuses for one of its texts is split until the text stands alone: the error of its line.
4. Every few seconds the rows are synced and noted, so that the same command can go on after an interruption.

Memory holds two windows and no more.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from penstock.embedding.lines import BadInput, Lines, Text, Window
from penstock.embedding.output import Output
from penstock.embedding.progress import Shown
from penstock.http_client import AGAIN, Asker

WINDOW_REQUESTS = 8
"""Requests of a window. More make texts of a request hardly more alike, and an interruption loses two windows."""
SAVE_EVERY_S = 2.0
_SPLIT = (400, 413, 422, 500, 504)
"""Statuses of answers whose cause may be one text, or more texts than the server computes in time."""
_HEADERS = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}


class Stopped(Exception):
    """The run cannot go on; what is done is kept."""


@dataclass(slots=True)
class _Found:
    """The vectors of some texts by their place, the scales of int8 vectors, and the errors of the other texts."""

    vectors: dict[int, np.ndarray] = field(default_factory=dict)
    scales: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Job:
    """One run."""

    def __init__(self, options: argparse.Namespace, lines: Lines, output: Output, shown: Shown) -> None:
        self._options, self._lines, self._output, self._shown = options, lines, output, shown
        self._path = f"/v1/encode/{quote(options.model)}"
        self._params: dict[str, Any] = {
            "output_types": ["dense"],
            "output_dtype": options.dtype,
            "is_query": options.query,
            "item_errors": True,
            **({"instruction": options.instruction} if options.instruction else {}),
            **({"options": {"dimensions": options.dimensions}} if options.dimensions else {}),
        }
        self._saved = time.monotonic()

    async def run(self, asker: Asker) -> None:
        """Send, receive and write until the input ends. Raises `Stopped`, `BadInput`, `Unreachable`."""
        done = self._output.progress
        self._lines.skip(done.rows, done.offset, done.digest)
        self._shown.begin(done.rows, done.offset)
        waiting: deque[tuple[Window, asyncio.Task[_Found]]] = deque()
        turns = asyncio.Semaphore(self._options.in_flight)
        written: Window | None = None
        try:
            async with asker, asyncio.TaskGroup() as group:
                for window in self._lines.windows(WINDOW_REQUESTS * self._options.batch):
                    waiting.append((window, group.create_task(self._vectors(asker, turns, window))))
                    if len(waiting) == 2:
                        written = await self._write(*waiting.popleft())
                while waiting:
                    written = await self._write(*waiting.popleft())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._shown.end()
            if written is not None:
                self._output.save(written.end, written.digest)
        if not done.rows:
            raise BadInput("the input has no line")
        if not done.width:
            raise Stopped("no line has a vector, so no file is written; mend the lines and give --restart")
        self._output.finish()

    async def _write(self, window: Window, task: asyncio.Task[_Found]) -> Window:
        """Append the rows of one window; tell its errors."""
        results = await task
        refused = [message for place, message in results.errors.items() if place not in window.errors]
        if len(refused) > 1 and len(results.errors) == len(window.texts) and not self._output.progress.width:
            raise Stopped(f"the server took no text of the first {len(window.texts)} lines: {refused[0]}")
        for place, message in sorted(results.errors.items()):
            self._shown.error(window.first + place + 1, message)
        places = sorted(results.vectors)
        try:
            vectors = np.stack([results.vectors[place] for place in places]) if places else None
            scales = np.asarray([results.scales.get(place, 1.0) for place in places], np.float32)
            self._output.append(vectors, len(window.texts), sorted(results.errors), scales)
        except ValueError as error:
            raise Stopped(f"vectors of different widths: {error}") from error
        progress = self._output.progress
        if len(progress.failed) > self._options.max_errors:
            raise Stopped(f"more than --max-errors {self._options.max_errors} lines have no vector")
        if time.monotonic() - self._saved > SAVE_EVERY_S:
            self._output.save(window.end, window.digest)
            self._saved = time.monotonic()
        return window

    async def _vectors(self, asker: Asker, turns: asyncio.Semaphore, window: Window) -> _Found:
        results = _Found(errors=dict(window.errors))

        # Bytes of the input for each character of a text: the share of a request in its window.
        share = (window.end - window.begin) / max(1, sum(len(text) for text in window.texts if text))

        async def one(texts: list[Text]) -> None:
            async with turns:
                await self._ask(asker, texts, results)
            self._shown.answered(len(texts), share * sum(len(text) for _, text in texts))

        self._shown.answered(len(window.errors), 0.0)
        async with asyncio.TaskGroup() as group:
            for texts in window.requests(self._options.batch):
                group.create_task(one(texts))
        return results

    async def _ask(self, asker: Asker, texts: list[Text], found: _Found) -> None:
        """Ask for vectors; a request that is refused for one of its texts is split."""
        body = msgspec.msgpack.encode(
            {"items": [{"text": text} for _, text in texts], "params": self._params}
        )
        # NOTE: half of a request that came too late may come in time; the same request would be late again.
        again = AGAIN if len(texts) == 1 else set(AGAIN).difference(_SPLIT)
        reply = await asker.post_until_answered(self._path, body, _HEADERS, self._options.tries, again)
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
                dense = item["dense"]
                found.vectors[place] = np.frombuffer(dense["values"][b"data"], dense["values"][b"type"])
                if "scale" in dense:
                    found.scales[place] = float(dense["scale"])
    except (
        msgspec.DecodeError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise Stopped(f"the server's answer cannot be read: {type(error).__name__}: {error}") from error
