"""The load of a run: when requests are sent, the requests of each protocol, and how an answer is judged.

1. Closed loop: each of `connections` callers sends the next request when the answer before has come.
2. Open loop: requests are due at a fixed rate. The latency of a request that has to wait counts the wait.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from penstock.bench.figures import Sample
from penstock.http_client import Asker, Unreachable

MAX_OPEN = 1024
"""Requests at a time in an open loop."""
_PAUSE_S = 0.1
"""After a failed request of a closed loop, so that a server that refuses at once is not flooded."""

Send = Callable[[float], Awaitable[bool]]
"""Sends a request that is due at a time; false when the request failed."""
T = TypeVar("T")
_OK = 200
_WARM_TRIES = 8
_JSON = {"Content-Type": "application/json"}
_MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
_WORDS = ("river", "stone", "letter", "garden", "window", "music", "paper", "winter")
_NO_ANSWER, _BROKEN, _UNREADABLE, _ITEMS = (
    "no answer", "stream broke off", "answer cannot be read", "200 with failed items",
)  # fmt: skip


class Clock:
    """The time of a run."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Let time pass."""
        await asyncio.sleep(seconds)


class Load:
    """The requests of one run: `rate` a second, or as many at a time as `connections`."""

    def __init__(
        self, rate: float | None, connections: int, requests: int | None, duration_s: float | None
    ) -> None:
        self._rate, self._requests, self._duration_s = rate, requests, duration_s
        self.connections = MAX_OPEN if rate else connections

    async def run(self, send: Send, clock: Clock) -> None:
        """Send all requests and wait for the answers."""
        await (self._open(send, clock, self._rate) if self._rate else self._closed(send, clock))

    def due(self, rate: float) -> Iterator[float]:
        """Seconds from the beginning at which requests are due."""
        for number in itertools.count():
            at = number / rate
            if number == self._requests or (self._duration_s is not None and at >= self._duration_s):
                return
            yield at

    async def _open(self, send: Send, clock: Clock, rate: float) -> None:
        slots, began = asyncio.Semaphore(MAX_OPEN), clock.now()

        async def one(due: float) -> None:
            try:
                await send(due)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            for at in self.due(rate):
                if (wait_s := began + at - clock.now()) > 0:
                    await clock.sleep(wait_s)
                await slots.acquire()
                group.create_task(one(began + at))

    async def _closed(self, send: Send, clock: Clock) -> None:
        numbers, began = itertools.count(), clock.now()

        async def caller() -> None:
            while self._duration_s is None or clock.now() - began < self._duration_s:
                if self._requests is not None and next(numbers) >= self._requests:
                    return
                if not await send(clock.now()):
                    await clock.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.connections):
                group.create_task(caller())


class Refused(Exception):
    """The server refused the first request."""


class _Known(msgspec.Struct):
    """What a server tells of a model; `outputs` leaves out generated text."""

    outputs: list[str] = msgspec.field(default_factory=list)


async def protocol_of(asker: Asker, model: str) -> str:
    """The protocol of the load that suits a model. Raises `Refused` for a model without one, and `Unreachable`."""
    reply = await asker.get(f"/v1/models/{quote(model)}")
    if reply.status != _OK:
        program = await asker.get(f"/v2/models/{quote(model)}")
        if program.status == _OK:
            return "kserve"
        way_out = "name a model that is served there, or choose a --protocol"
        raise Refused(f"{asker.url} does not tell what the model gives: {reply.message}; {way_out}")
    try:
        outputs = _read_json(reply.body, _Known).outputs
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise Refused(f"{asker.url} does not tell what the model gives; choose a --protocol") from None
    if not outputs:
        return "chat"
    if "json" in outputs:
        raise Refused(
            f"{model} extracts, for which there is no load; chat, vectors, scores and tensors have one"
        )
    return "score" if outputs == ["score"] else "encode"


class _Usage(msgspec.Struct):
    total_tokens: int | None = None
    completion_tokens: int | None = None


class _Item(msgspec.Struct):
    error: Any = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    items: list[_Item] = msgspec.field(default_factory=list)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = msgspec.field(default_factory=list)
    error: Any = None

    @property
    def has_text(self) -> bool:
        """Whether a piece of an answer or of its reasoning is there."""
        deltas = [choice.delta for choice in self.choices if choice.delta]
        return any(delta.content or delta.reasoning_content for delta in deltas)


# NOTE: msgspec passes over fields that a type lacks without a look at the bytes of their texts, so the readers look.
def _read_json(body: bytes, kind: type[T]) -> T:
    """A JSON body. Raises msgspec.DecodeError, ValueError, also for bytes that are no UTF-8, and RecursionError."""
    return msgspec.json.decode(body.decode(), type=kind)


def _read_msgpack(body: bytes, kind: type[T]) -> T:
    """A MessagePack body. Raises what `_read_json` raises."""
    return msgspec.convert(msgspec.msgpack.decode(body), kind)


class Requests:
    """Requests of one run; each gives a sample."""

    def __init__(
        self, asker: Asker, options: argparse.Namespace, now: Callable[[], float], samples: list[Sample]
    ) -> None:
        self._asker, self._options, self._now, self._samples = asker, options, now, samples
        self._numbers = itertools.count()
        self._binary = options.protocol in ("encode", "score")
        self._headers = _MSGPACK if self._binary else _JSON
        model = quote(options.model)
        self._path = {
            "encode": f"/v1/encode/{model}",
            "score": f"/v1/score/{model}",
            "embeddings": "/v1/embeddings",
            "rerank": "/v1/rerank",
            "kserve": f"/v2/models/{model}/infer",
            "chat": "/v1/chat/completions",
        }[options.protocol]

    async def warm(self) -> None:
        """Send a request that does not count, so that the model is loaded. Raises `Refused`, `Unreachable`."""
        # NOTE: a model that loads is waited for, a server that is not there is not.
        reply = await self._asker.post_until_answered(self._path, self.body(), self._headers, _WARM_TRIES)
        if reply.status != _OK:
            raise Refused(f"{self._asker.url} refused the first request with {reply.message}")

    async def send(self, due: float) -> bool:
        """Send one request, whose latency counts from `due`; false when the request failed."""
        ask = self._streamed if self._options.protocol == "chat" else self._answered
        sample = await ask(due)
        self._samples.append(sample)
        return not sample.error

    def body(self) -> bytes:
        """The next body; no text comes twice, so that no cache answers, but `--text` is sent as given."""
        options = self._options
        texts = [self._text() for _ in range(options.items)]
        items = [{"text": text} for text in texts]
        bodies: dict[str, Callable[[], dict[str, Any]]] = {
            "encode": lambda: {"items": items},
            "score": lambda: {"query": {"text": self._text()}, "items": items},
            "embeddings": lambda: {"model": options.model, "input": texts},
            "rerank": lambda: {"model": options.model, "query": self._text(), "documents": texts},
            "kserve": lambda: {
                "inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}]
            },
            "chat": lambda: {
                "model": options.model,
                "messages": [{"role": "user", "content": texts[0]}],
                "max_tokens": options.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        }
        encode = msgspec.msgpack.encode if self._binary else msgspec.json.encode
        return encode(bodies[options.protocol]())

    def _text(self) -> str:
        if self._options.text is not None:
            return str(self._options.text)
        words = itertools.islice(itertools.cycle(_WORDS), self._options.tokens - 1)
        return " ".join([str(next(self._numbers)), *words])

    async def _answered(self, due: float) -> Sample:
        try:
            reply = await self._asker.post(self._path, self.body(), self._headers)
        except Unreachable:
            return Sample(self._now() - due, _NO_ANSWER)
        sample = Sample(self._now() - due)
        if reply.status != _OK:
            sample.error = str(reply.status)
            return sample
        read = _read_msgpack if self._binary else _read_json
        try:
            answer = read(reply.body, _Answer)
        except (msgspec.DecodeError, ValueError, RecursionError):
            sample.error = _UNREADABLE
            return sample
        sample.tokens = (answer.usage.total_tokens or 0) if answer.usage else 0
        if any(item.error for item in answer.items):
            sample.error = _ITEMS
        return sample

    async def _streamed(self, due: float) -> Sample:
        sample = Sample(0.0)
        try:
            async with self._asker.stream(self._path, self.body(), self._headers) as answer:
                sample.error = "" if answer.status == _OK else str(answer.status)
                if not sample.error:
                    sample.error = await self._read(answer.content, due, sample)
        except (aiohttp.ClientError, OSError, TimeoutError):
            sample.error = _BROKEN if sample.first_s is not None else _NO_ANSWER
        except (msgspec.DecodeError, ValueError, RecursionError, HttpProcessingError):
            sample.error = _UNREADABLE
        sample.latency_s = self._now() - due
        return sample

    async def _read(self, lines: aiohttp.StreamReader, due: float, sample: Sample) -> str:
        """Take the times of a stream; returns why the stream failed, or ""."""
        before = 0.0
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            value = line[5:].strip()
            if value == b"[DONE]":
                return ""
            chunk = _read_json(value, _Chunk)
            if chunk.error:
                return "error in the stream"
            if chunk.usage:
                sample.tokens = chunk.usage.completion_tokens or 0
            if chunk.has_text:
                now = self._now()
                if sample.first_s is None:
                    sample.first_s = now - due
                else:
                    sample.gaps_s.append(now - before)
                before = now
        return _BROKEN
