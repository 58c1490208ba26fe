"""Reads request bodies: limits are checked on the header first, then as bytes arrive; all bodies share a budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from falcon.asgi import Request

from ipc.errors import BodyTooLarge, QueueFull
from ipc.settings import Limits


class BodyReader:
    """Reader with a byte budget for everything this frontend has buffered."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffered = 0

    async def read(self, req: Request) -> bytes:
        """The whole body. Raises `BodyTooLarge`, or `QueueFull` when too many bytes are buffered already."""
        limit = self._limits.max_body_bytes
        length = req.content_length
        if length is not None:
            if length > limit:
                raise BodyTooLarge(f"body: {length} bytes, the limit is {limit} (limits.max_body_bytes)")
            if length <= 1 << 16:
                return await req.stream.read()
        with self._hold(length or 0) as taken:
            parts: list[bytes] = []
            total = 0
            async for part in req.stream:
                total += len(part)
                if total > limit:
                    raise BodyTooLarge(f"body: more than {limit} bytes (limits.max_body_bytes)")
                if length is None:
                    taken.append(len(part))
                    self._buffered += len(part)
                    self._check()
                parts.append(part)
            return b"".join(parts)

    @contextmanager
    def _hold(self, nbytes: int) -> Iterator[list[int]]:
        taken = [nbytes]
        self._buffered += nbytes
        try:
            self._check()
            yield taken
        finally:
            self._buffered -= sum(taken)

    def _check(self) -> None:
        if self._buffered > self._limits.max_buffered_bytes:
            raise QueueFull(
                "too many request bytes are being received (limits.max_buffered_bytes)", retry_after_s=1
            )
