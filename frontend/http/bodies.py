"""Bodies that arrive, and clients that leave.

`until_disconnect` ends work when its client goes away.

`CALLBACK_KEY` of the ASGI scope holds None while no work runs, a function to call at the disconnect while work runs,
`GONE` after the disconnect. Penstock's own server sets the key from the connection, at no cost while the client stays.
Another ASGI server sends an event only: `noting` sets `GONE` when the event is received, and a second task waits for
the event while work runs and the body has been read.

`BodyReader` reads request bodies and counts them, from their first byte until their request is answered.

1. A declared length over the limit is refused at once; otherwise bytes are counted as they arrive, so that a client
   that declares much and sends little takes no room from others.
2. All bodies share a budget. A body counts until its request ends, since decoded values live as long.
3. Reading ends with the request's deadline, and when the client goes away: an incomplete body is never decoded.

`Places` is a bound that callers share: no caller holds more places than are free. One caller alone holds half of the
places at most, two a third each, n callers 1/(n + 1) each: the next caller finds free places. A single request may take
all free places at once.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Self, TypeVar

from falcon.asgi import Request

from ipc import deadline
from ipc.errors import BodyTooLarge, Cancelled, DeadlineExceeded, QueueFull
from ipc.settings import Limits

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

CALLBACK_KEY = "penstock.disconnected"
_EVENTS_KEY = "penstock.events"
GONE = object()
SMALL_NBYTES = 64 << 10
"""Bodies up to this size are counted but never refused for lack of room."""
BODY_KEY = "penstock.body"
"""Where Penstock's own server puts a body into the ASGI scope that came with its head and is small."""
LARGE_NBYTES = 4 << 20
TRIM_AFTER_S = 0.2
_LATE = "the deadline passed while the body was being received"
_CUT = "the client went away before it had sent the whole body"


def note_disconnect(scope: Any) -> None:
    """The client of `scope` has gone: remember that, and end the work for the client."""
    callback = scope.get(CALLBACK_KEY)
    scope[CALLBACK_KEY] = GONE
    if callback is not None and callback is not GONE:
        callback()


def is_gone(scope: Any) -> bool:
    """Whether the client of `scope` has gone, as far as the server knows."""
    return scope.get(CALLBACK_KEY) is GONE


def noting(scope: Any, receive: Receive) -> Receive:
    """`receive` of a server that does not call back, made to note the disconnect in `scope`."""
    scope[CALLBACK_KEY], scope[_EVENTS_KEY] = None, (events := _Events(scope, receive))
    return events.receive


async def until_disconnect(work: Coroutine[Any, Any, T], scope: dict[str, Any]) -> T:
    """The result of `work`. Raises `Cancelled` when the client of `scope` went away first; `work` is cancelled then.

    A request has one such work at a time: what it calls runs under the same watch.
    """
    if scope.get(CALLBACK_KEY) is GONE:
        work.close()
        raise Cancelled("the client went away")
    task = asyncio.current_task()
    assert task is not None
    events: _Events | None = scope.get(_EVENTS_KEY)
    scope[CALLBACK_KEY] = task.cancel
    if events is not None:
        events.watch()
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone(scope):
            raise
        task.uncancel()
        raise Cancelled("the client went away") from None
    finally:
        if scope[CALLBACK_KEY] is not GONE:
            scope[CALLBACK_KEY] = None
        if events is not None:
            events.leave()


class _Events:
    """The events of one request. One reader at a time waits for them: Falcon until the body is read, then this."""

    def __init__(self, scope: Any, receive: Receive) -> None:
        self._scope, self._receive = scope, receive
        self._body_left = self._watched = False
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        """The next event, which is noted."""
        event = await self._receive()
        if event["type"] == "http.disconnect":
            note_disconnect(self._scope)
            return event
        self._body_left = bool(event.get("more_body"))
        if self._watched and self._watcher is None:
            self.watch()
        return event

    def watch(self) -> None:
        """Work runs: wait for the disconnect as soon as the body has been read."""
        self._watched = True
        if not self._body_left:
            self._watcher = asyncio.ensure_future(self._drain())

    def leave(self) -> None:
        """The work has ended."""
        self._watched = False
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _drain(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


class BodyReader:
    """Reader with a byte budget for the bodies of all requests that this frontend is working on."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held_nbytes = 0
        self._trimming: asyncio.TimerHandle | None = None

    def holding(self, nbytes: int) -> Holding:
        """Count `nbytes` that have been received whole, meanwhile. Entering raises `QueueFull` as `receive` does."""
        return Holding(self, nbytes)

    def check_room(self, nbytes: int) -> None:
        """Raise `QueueFull` when too much is held and a body of `nbytes` so far is not small."""
        if self.held_nbytes > self.limits.max_buffered_bytes and nbytes > SMALL_NBYTES:
            raise QueueFull(
                "too many request bytes are being received or worked on (limits.max_buffered_bytes)",
                retry_after_s=1,
            )

    def at_hand(self, req: Request) -> bytes | None:
        """The whole of a small body that came with its head; None for any other, which `receive` reads.

        The body is counted by `holding`.
        """
        body: bytes | None = req.scope.get(BODY_KEY)
        return None if body is None or len(body) > self.limits.max_body_bytes else body

    def trim_soon(self) -> None:
        """Return memory of large bodies, which the C library keeps, to the system once their requests have ended."""
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        # NOTE: the library keeps up to 64 MiB at the end of its heap, and whatever a thread has freed.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)

    def receive(self, req: Request, deadline_ns: int, most_nbytes: int | None = None) -> HeldBody:
        """The body of `req` as an asynchronous context: entering reads it, leaving ends its share of the budget.

        A body above `most_nbytes`, where that is less than `limits.max_body_bytes`, is refused before it is read.
        """
        return HeldBody(self, req, deadline_ns, most_nbytes)

    def pour(self, req: Request, deadline_ns: int, take: Callable[[bytes], object]) -> PouredBody:
        """As `receive`, for a body that is kept elsewhere: `take` gets the pieces as they arrive."""
        return PouredBody(self, req, deadline_ns, take)

    async def pieces(self, req: Request, deadline_ns: int, max_nbytes: int) -> AsyncGenerator[bytes, None]:
        """The pieces of a body of at most `max_nbytes`, each of which counts until the next one is asked for.

        Raises as `HeldBody` does.
        """
        limit = min(max_nbytes, self.limits.max_body_bytes)
        length, nbytes, stream = req.content_length, 0, aiter(req.stream)
        if length is not None and length > limit:
            raise BodyTooLarge(f"body: {length} bytes, the limit is {limit}")
        while True:
            try:
                async with asyncio.timeout(deadline.remaining_s(deadline_ns)):
                    piece = await anext(stream, None)
            except TimeoutError:
                raise DeadlineExceeded(_LATE, retry_after_s=1) from None
            if piece is None:
                break
            nbytes += len(piece)
            if nbytes > limit:
                raise BodyTooLarge(f"body: more than {limit} bytes")
            with self.holding(len(piece)):
                yield piece
        if is_gone(req.scope) or (length is not None and nbytes < length):
            raise Cancelled(_CUT)


class Holding:
    """Bytes that count as long as the context is open."""

    __slots__ = ("_nbytes", "_reader")

    def __init__(self, reader: BodyReader, nbytes: int) -> None:
        self._reader, self._nbytes = reader, nbytes

    def __enter__(self) -> Self:
        self._reader.held_nbytes += self._nbytes
        try:
            self._reader.check_room(self._nbytes)
        except QueueFull:
            self._reader.held_nbytes -= self._nbytes
            raise
        return self

    def grow(self, nbytes: int) -> None:
        """Count more bytes within the context. Raises `QueueFull` as entering does."""
        self._nbytes += nbytes
        self._reader.held_nbytes += nbytes
        self._reader.check_room(self._nbytes)

    def __exit__(self, *_: object) -> None:
        self._reader.held_nbytes -= self._nbytes


class HeldBody:
    """One body and its share of the budget."""

    __slots__ = ("_deadline_ns", "_limit", "_nbytes", "_reader", "_req", "_stated")

    def __init__(
        self, reader: BodyReader, req: Request, deadline_ns: int, most_nbytes: int | None = None
    ) -> None:
        self._reader, self._req, self._deadline_ns = reader, req, deadline_ns
        self._nbytes = 0
        limit = reader.limits.max_body_bytes
        self._limit = limit if most_nbytes is None else min(limit, most_nbytes)
        self._stated = " (limits.max_body_bytes)" if self._limit == limit else ""

    async def __aenter__(self) -> bytes:
        """The whole body; nothing of one that is poured.

        Raises:
            BodyTooLarge: it is over its limit.
            QueueFull: too many bytes are held already.
            DeadlineExceeded: it did not arrive in time.
            Cancelled: the client went away, or was sent away, before it had sent all.
        """
        try:
            return await self._read()
        except BaseException:
            self._give_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        self._reader.held_nbytes -= self._nbytes
        if self._nbytes >= LARGE_NBYTES:
            self._reader.trim_soon()
        self._nbytes = 0

    async def _read(self) -> bytes:
        length = self._declared_nbytes()
        # PERF: a body that arrived with the head needs no timer.
        if length is not None and self._req.stream.tell() >= length:
            body = await self._req.stream.read()
            self._count(len(body))
            return body
        gathered = bytearray()
        await self._gather(length, gathered.extend)
        return bytes(gathered)

    def _declared_nbytes(self) -> int | None:
        length, limit = self._req.content_length, self._limit
        if length is not None and length > limit:
            raise BodyTooLarge(f"body: {length} bytes, the limit is {limit}{self._stated}")
        return length

    async def _gather(self, length: int | None, take: Callable[[bytes], object]) -> None:
        """Give `take` each piece until all have come."""
        try:
            async with asyncio.timeout(deadline.remaining_s(self._deadline_ns)):
                await self._take_all(length, take)
        except TimeoutError:
            raise DeadlineExceeded(_LATE, retry_after_s=1) from None

    async def _take_all(self, length: int | None, take: Callable[[bytes], object]) -> None:
        limit = self._limit
        async for part in self._req.stream:
            if self._nbytes + len(part) > limit:
                raise BodyTooLarge(f"body: more than {limit} bytes{self._stated}")
            self._count(len(part))
            take(part)
        if is_gone(self._req.scope) or (length is not None and self._nbytes < length):
            raise Cancelled(_CUT)

    def _count(self, nbytes: int) -> None:
        reader = self._reader
        self._nbytes += nbytes
        reader.held_nbytes += nbytes
        reader.check_room(self._nbytes)


class PouredBody(HeldBody):
    """One body that is kept elsewhere, and its share of the budget."""

    __slots__ = ("_take",)

    def __init__(
        self, reader: BodyReader, req: Request, deadline_ns: int, take: Callable[[bytes], object]
    ) -> None:
        super().__init__(reader, req, deadline_ns)
        self._take = take

    async def _read(self) -> bytes:
        await self._gather(self._declared_nbytes(), self._take)
        return b""


class Places:
    """`limit` places of one frontend."""

    def __init__(self, limit: int) -> None:
        self.limit = self.free = limit
        self._held: Counter[str] = Counter()

    def take(self, caller: str, count: int = 1) -> bool:
        """Give `caller` more places; False when `caller` would hold more than are free now."""
        if self._held[caller] + count > self.free:
            return False
        self._held[caller] += count
        self.free -= count
        return True

    def give(self, caller: str, count: int = 1) -> None:
        """`caller` gives places back."""
        self._held[caller] -= count
        self.free += count
        if not self._held[caller]:
            del self._held[caller]
