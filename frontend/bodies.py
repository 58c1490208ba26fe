"""Reads request bodies and counts them, from their first byte until their request is answered.

1. A declared length over the limit is refused at once; otherwise bytes are counted as they arrive, so that a client
   that declares much and sends little takes no room from others.
2. All bodies share a budget. What was decoded from a body lives as long as the request, so the body counts as long.
3. Reading ends with the request's deadline, and with the client: a body that was cut short is never decoded.
"""

from __future__ import annotations

import asyncio

from falcon.asgi import Request

from frontend.disconnect import is_gone
from ipc import deadline
from ipc.errors import BodyTooLarge, Cancelled, DeadlineExceeded, QueueFull
from ipc.settings import Limits

SMALL_NBYTES = 64 << 10
"""Bodies up to this size are counted but never refused for lack of room."""


class BodyReader:
    """Reader with a byte budget for the bodies of all requests that this frontend is working on."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held_nbytes = 0

    def hold(self, req: Request, deadline_ns: int) -> HeldBody:
        """The body of `req` as an asynchronous context: entering reads it, leaving ends its share of the budget."""
        return HeldBody(self, req, deadline_ns)


class HeldBody:
    """One body and its share of the budget."""

    __slots__ = ("_deadline_ns", "_nbytes", "_reader", "_req")

    def __init__(self, reader: BodyReader, req: Request, deadline_ns: int) -> None:
        self._reader, self._req, self._deadline_ns = reader, req, deadline_ns
        self._nbytes = 0

    async def __aenter__(self) -> bytes:
        """The whole body.

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
        self._nbytes = 0

    async def _read(self) -> bytes:
        req, limit = self._req, self._reader.limits.max_body_bytes
        length = req.content_length
        if length is not None:
            if length > limit:
                raise BodyTooLarge(f"body: {length} bytes, the limit is {limit} (limits.max_body_bytes)")
            # PERF: what has arrived with the head needs no timer.
            if req.stream.tell() >= length:
                body = await req.stream.read()
                self._count(len(body))
                return body
        try:
            async with asyncio.timeout(deadline.remaining_s(self._deadline_ns)):
                return await self._gather(length, limit)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed while the body was being received", retry_after_s=1
            ) from None

    async def _gather(self, length: int | None, limit: int) -> bytes:
        body = bytearray()
        async for part in self._req.stream:
            body += part
            if len(body) > limit:
                raise BodyTooLarge(f"body: more than {limit} bytes (limits.max_body_bytes)")
            self._count(len(part))
        if is_gone(self._req.scope) or (length is not None and len(body) < length):
            raise Cancelled("the client went away before it had sent the whole body")
        return bytes(body)

    def _count(self, nbytes: int) -> None:
        reader = self._reader
        self._nbytes += nbytes
        reader.held_nbytes += nbytes
        if reader.held_nbytes > reader.limits.max_buffered_bytes and self._nbytes > SMALL_NBYTES:
            raise QueueFull(
                "too many request bytes are being received or worked on (limits.max_buffered_bytes)",
                retry_after_s=1,
            )
