"""Streams of brokers in memory, which several gateways of one process use: as much as stored objects ask of JetStream.

`Streams` is what the brokers keep. `StreamClient` stands in for the `Broker` of one gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

from nats.js.errors import APIError, BucketNotFoundError, NotFoundError

_EPOCH = datetime(2020, 1, 1)
PAGE = 100_000
"""Subjects that are told at a time."""


class Stream:
    """One stream, with the last message of each subject."""

    def __init__(self, created: datetime) -> None:
        self.created, self.last = created, 0
        self.messages: dict[str, tuple[int, bytes, dict[str, str]]] = {}


class Streams:
    """All streams. `on_publish` sees each message before its time; consumers lack the last `lag` messages."""

    def __init__(self) -> None:
        self.by_name: dict[str, Stream] = {}
        self.clients: list[StreamClient] = []
        self.max_payload = 1 << 20
        self.requests = self.lag = 0
        self.on_publish: Callable[[str, bytes], None] = lambda subject, data: None
        self._days = itertools.count(1)

    def drop(self, bucket: str) -> None:
        """A bucket is removed with all values."""
        del self.by_name[f"KV_{bucket}"]

    def create(self, bucket: str) -> None:
        """A bucket is made."""
        self.by_name.setdefault(f"KV_{bucket}", Stream(_EPOCH + timedelta(days=next(self._days))))

    def stream(self, name: str) -> Stream:
        """A stream by name."""
        if name not in self.by_name:
            raise NotFoundError(code=404, description="stream not found", err_code=10059)
        return self.by_name[name]

    def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Keep a message, unless it names another last write; returns its number. Clients hear refused ones, too."""
        for client in self.clients:
            client.hear(subject, data, headers)
        stream = self.stream(f"KV_{subject.split('.')[1]}")
        last = stream.messages.get(subject, (0,))[0]
        expected = headers.get("Nats-Expected-Last-Sequence"), stream.last
        expected_of_subject = headers.get("Nats-Expected-Last-Subject-Sequence"), last
        for named, found in (expected, expected_of_subject):
            if named is not None and int(named) != found:
                raise APIError(code=400, description=f"wrong last sequence: {found}", err_code=10071)
        if len(data) > self.max_payload:
            raise APIError(code=400, description="message size exceeds maximum allowed", err_code=10054)
        stream.last += 1
        stream.messages[subject] = stream.last, data, headers
        return stream.last


class _Client:
    """The client library, as far as stored objects ask."""

    def __init__(self, owner: StreamClient) -> None:
        self._owner = owner

    @property
    def max_payload(self) -> int:
        return self._owner.streams.max_payload

    @property
    def servers(self) -> list[str]:
        return ["one"]

    def jetstream(self, timeout: float) -> _JetStream:
        assert timeout > 0
        return _JetStream(self._owner)

    async def request(self, subject: str, data: bytes, timeout: float) -> Any:
        """A page of the subjects of a stream."""
        asked, stream = json.loads(data), self._owner.streams.stream(subject.split(".", 4)[4])
        prefix, offset = asked["subjects_filter"].removesuffix(">"), asked["offset"]
        subjects = sorted(each for each in stream.messages if each.startswith(prefix))
        page = dict.fromkeys(subjects[offset : offset + PAGE], 1)
        state = {"last_seq": stream.last, "messages": len(stream.messages), "subjects": page}
        return SimpleNamespace(data=json.dumps({"state": state}).encode())


class _JetStream:
    def __init__(self, owner: StreamClient) -> None:
        self._owner = owner

    async def _streams(self) -> Streams:
        await asyncio.sleep(0)
        self._owner.streams.requests += 1
        if self._owner.is_silent:
            raise TimeoutError("no broker answers")
        return self._owner.streams

    async def stream_info(self, name: str, subjects_filter: str = "") -> Any:
        stream = (await self._streams()).stream(name)
        prefix = subjects_filter.removesuffix(">")
        subjects = {subject: 1 for subject in stream.messages if subject.startswith(prefix)}
        page = dict(sorted(subjects.items())[:PAGE]) if subjects_filter else None
        state = SimpleNamespace(last_seq=stream.last, messages=len(stream.messages), subjects=page)
        return SimpleNamespace(created=stream.created, state=state)

    async def get_msg(
        self, name: str, seq: int = 0, subject: str = "", direct: bool = False, next: bool = False
    ) -> Any:
        messages = (await self._streams()).stream(name).messages
        if next:
            later = sorted((each[0], key) for key, each in messages.items() if each[0] >= seq)
            subject = later[0][1] if later else ""
        if subject not in messages:
            raise NotFoundError(code=404, description="no message found", err_code=10037)
        revision, data, headers = messages[subject]
        return SimpleNamespace(seq=revision, subject=subject, data=data, headers=headers)

    async def publish(
        self, subject: str, data: bytes, timeout: float, headers: dict[str, str] | None = None
    ) -> Any:
        streams = await self._streams()
        streams.on_publish(subject, data)
        return SimpleNamespace(seq=streams.publish(subject, data, dict(headers or {})))

    async def purge_stream(self, name: str, subject: str) -> None:
        stream = (await self._streams()).stream(name)
        for key in [key for key in stream.messages if key.startswith(subject.removesuffix("*"))]:
            del stream.messages[key]

    async def delete_msg(self, name: str, revision: int) -> None:
        stream = (await self._streams()).stream(name)
        found = [key for key, each in stream.messages.items() if each[0] == revision]
        if not found:
            raise APIError(code=400, description="no message found", err_code=10057)
        del stream.messages[found[0]]

    async def subscribe(self, subject: str, *, stream: str, **_: Any) -> _Subscription:
        """An ordered consumer that delivers all messages of a stream."""
        streams = await self._streams()
        messages = streams.stream(stream).messages
        rows = sorted((each[0], key, each) for key, each in messages.items())[: len(messages) - streams.lag]
        return _Subscription(rows)

    async def key_value(self, bucket: str) -> None:
        """Whether a bucket is there."""
        if f"KV_{bucket}" not in (await self._streams()).by_name:
            raise BucketNotFoundError

    async def create_key_value(self, config: Any) -> None:
        (await self._streams()).create(config.bucket)


class _Subscription:
    _sub = SimpleNamespace(_jsi=None)
    """Without flow control."""

    def __init__(self, rows: list[Any]) -> None:
        self.messages = self._delivered(rows)

    async def _delivered(self, rows: list[Any]) -> AsyncGenerator[Any]:
        for left, (_, key, (revision, data, headers)) in zip(reversed(range(len(rows))), rows, strict=True):
            await asyncio.sleep(0)
            sequence = SimpleNamespace(stream=revision)
            metadata = SimpleNamespace(num_pending=left, sequence=sequence)
            yield SimpleNamespace(subject=key, data=data, headers=headers, metadata=metadata)

    async def unsubscribe(self) -> None:
        """No more is wanted."""
        await self.messages.aclose()


class StreamClient:
    """One gateway's connection. Without `up` it has no broker; a broker that `is_silent` answers nothing in time."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.up, self.is_silent = streams, True, False
        self.replicas = 1
        self.client: Any = _Client(self)
        self.on_up: list[Callable[[], None]] = []
        self._listeners: list[tuple[str, Callable[[Any], None]]] = []
        streams.clients.append(self)

    def listen(self, subject: str, handler: Callable[[Any], None]) -> None:
        """Call `handler` for all messages whose subjects begin like `subject`."""
        self._listeners.append((subject.rstrip("*>"), handler))

    def hear(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """A message arrives."""
        for prefix, handler in self._listeners:
            if self.up and subject.startswith(prefix):
                handler(SimpleNamespace(subject=subject, data=data, headers=headers))
