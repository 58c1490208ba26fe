"""Reads request bodies and counts them, from their first byte until their request is answered.

1. A declared length over the limit is refused at once; otherwise bytes are counted as they arrive, so that a client
   that declares much and sends little takes no room from others.
2. All bodies share a budget. A body counts until its request ends, since decoded values live as long.
3. Reading ends with the request's deadline, and when the client goes away: an incomplete body is never decoded.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from falcon.asgi import Request

from frontend.http.disconnect import is_gone
from ipc import deadline
from ipc.errors import BodyTooLarge, Cancelled, DeadlineExceeded, QueueFull
from ipc.settings import Limits

SMALL_NBYTES = 64 << 10
"""Bodies up to this size are counted but never refused for lack of room."""
BODY_KEY = "penstock.body"
"""Where Penstock's own server puts a body into the ASGI scope that came with its head and is small."""
LARGE_NBYTES = 4 << 20
TRIM_AFTER_S = 0.2


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

    def receive(self, req: Request, deadline_ns: int) -> HeldBody:
        """The body of `req` as an asynchronous context: entering reads it, leaving ends its share of the budget."""
        return HeldBody(self, req, deadline_ns)

    def pour(self, req: Request, deadline_ns: int, take: Callable[[bytes], object]) -> PouredBody:
        """As `receive`, for a body that is kept elsewhere: `take` gets the pieces as they arrive."""
        return PouredBody(self, req, deadline_ns, take)


class Holding:
    """Bytes that count as long as the context is open."""

    __slots__ = ("_nbytes", "_reader")

    def __init__(self, reader: BodyReader, nbytes: int) -> None:
        self._reader, self._nbytes = reader, nbytes

    def __enter__(self) -> None:
        self._reader.held_nbytes += self._nbytes
        try:
            self._reader.check_room(self._nbytes)
        except QueueFull:
            self._reader.held_nbytes -= self._nbytes
            raise

    def __exit__(self, *_: object) -> None:
        self._reader.held_nbytes -= self._nbytes


class HeldBody:
    """One body and its share of the budget."""

    __slots__ = ("_deadline_ns", "_nbytes", "_reader", "_req")

    def __init__(self, reader: BodyReader, req: Request, deadline_ns: int) -> None:
        self._reader, self._req, self._deadline_ns = reader, req, deadline_ns
        self._nbytes = 0

    async def __aenter__(self) -> bytes:
        """The whole body; nothing of one that is poured.

        Raises:
            BodyTooLarge: it is over `limits.max_body_bytes`.
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
        length, limit = self._req.content_length, self._reader.limits.max_body_bytes
        if length is not None and length > limit:
            raise BodyTooLarge(f"body: {length} bytes, the limit is {limit} (limits.max_body_bytes)")
        return length

    async def _gather(self, length: int | None, take: Callable[[bytes], object]) -> None:
        """Give `take` each piece until all have come."""
        try:
            async with asyncio.timeout(deadline.remaining_s(self._deadline_ns)):
                await self._take_all(length, take)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed while the body was being received", retry_after_s=1
            ) from None

    async def _take_all(self, length: int | None, take: Callable[[bytes], object]) -> None:
        limit = self._reader.limits.max_body_bytes
        async for part in self._req.stream:
            if self._nbytes + len(part) > limit:
                raise BodyTooLarge(f"body: more than {limit} bytes (limits.max_body_bytes)")
            self._count(len(part))
            take(part)
        if is_gone(self._req.scope) or (length is not None and self._nbytes < length):
            raise Cancelled("the client went away before it had sent the whole body")

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
