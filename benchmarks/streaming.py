"""Clients of event streams that read without parsing, so that the load costs little beside the server.

1. `chat` makes the request of a stream that tells its counts at the end.
2. `read` sends all requests at once, each over a connection of its own, and reads until every stream has ended.
3. A `Streamed` has the instants of what arrived and the last bytes. It counts the tokens that the server told.

With `pause_s` the sockets are looked at that seldom: what has come meanwhile is read at once, as many clients on other
machines would have read it, without their processor time.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load import Address, post

_BUFFER_NBYTES = 1 << 18
_TAIL_NBYTES = 4096
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_TEXT = re.compile(rb'"content":\s*"[^"]')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclass(slots=True)
class Streamed:
    """One stream; instants are of `time.perf_counter`."""

    sent_at: float
    answered_at: float = 0.0
    """When the first text was read; the head of a response, and events without text, may come before."""
    arrivals: list[float] = field(default_factory=list)
    """When something was read since."""
    nbytes: int = 0
    tail: bytes = b""
    whole: bytearray | None = None
    """All bytes, where they are kept."""

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self.tail.endswith(_LAST_CHUNK)

    @property
    def first_s(self) -> float:
        """Seconds to the first text."""
        return self.answered_at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between what was read."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Tokens of the answer as the server told. Raises ValueError for a stream that did not end well."""
        return self._told(_COMPLETION)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the server told."""
        return self._told(_PROMPT)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the server did not compute."""
        return self._told(_CACHED)

    @property
    def answer(self) -> bytes:
        """Text of the answer as far as the events have plain letters."""
        return b"".join(re.findall(rb'"content":\s*"([^"]*)"', bytes(self.whole or b"")))

    def _told(self, pattern: re.Pattern[bytes]) -> int:
        found = pattern.findall(self.tail)
        if not found:
            raise ValueError(f"a stream ended without counts: {self.tail[-400:]!r}")
        return int(found[-1])


def chat(model: str, text: str, max_tokens: int, **more: Any) -> bytes:
    """A whole request for a greedy answer in a stream; `more` are other fields of the body."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    return post("/v1/chat/completions", body)


class Readers:
    """Streams that run. Use as a context manager: leaving closes all connections."""

    def __init__(self, address: Address, *, keep: bool = False) -> None:
        """`keep` keeps all bytes of the streams."""
        self._address, self._keep = address, keep
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(_BUFFER_NBYTES)
        self.streams: list[Streamed] = []

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *failure: object) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def send(self, request: bytes) -> Streamed:
        """Begin one more stream."""
        connection = socket.create_connection(self._address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # NOTE: the clock is read before. A server on the same core may answer before sending returns.
        stream = Streamed(time.perf_counter(), whole=bytearray() if self._keep else None)
        connection.sendall(request)
        connection.setblocking(False)
        self.streams.append(stream)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    @property
    def are_running(self) -> bool:
        """Whether some stream has not ended."""
        return bool(self._selector.get_map())

    def look(self, timeout_s: float = 60.0) -> None:
        """Wait until something can be read, and read it. Raises TimeoutError, and ConnectionError for a lost stream."""
        ready = self._selector.select(timeout_s)
        if not ready:
            raise TimeoutError(f"no stream said anything for {timeout_s:g} s")
        now = time.perf_counter()
        for key, _ in ready:
            connection, stream = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            count = connection.recv_into(self._buffer)
            self._keep_end(stream, memoryview(self._buffer)[:count], now)
            if stream.ended:
                self._selector.unregister(connection)
                connection.close()
            elif not count:
                raise ConnectionError(f"a stream was cut off after {stream.tail[-200:]!r}")

    @staticmethod
    def _keep_end(stream: Streamed, data: memoryview, now: float) -> None:
        if not stream.answered_at and _TEXT.search(data):
            stream.answered_at = now
        if stream.answered_at:
            stream.arrivals.append(now)
        stream.nbytes += len(data)
        stream.tail = (stream.tail + bytes(data[-_TAIL_NBYTES:]))[-_TAIL_NBYTES:]
        if stream.whole is not None:
            stream.whole += data


def read(
    address: Address, requests: Sequence[bytes], *, pause_s: float = 0.0, keep: bool = False
) -> list[Streamed]:
    """Send all requests at once, and read until all streams have ended."""
    with Readers(address, keep=keep) as readers:
        for request in requests:
            readers.send(request)
        while readers.are_running:
            readers.look()
            if pause_s:
                time.sleep(pause_s)
        return readers.streams
