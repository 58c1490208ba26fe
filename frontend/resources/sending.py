"""The base of POST routes, and large responses, which leave in slices that are copied as they go.

1. `parts` is a list of private bytes and of views on a leased block. Each slice is a private copy, and the block's
   generation is checked after the copy, so a revoked lease ends the response and never shows another request's data.
2. The lease ends with the last copy. A client that has not taken everything after `lease_copy_after_s` gets the rest
   from a private copy, so a slow reader never holds arena memory.
3. Private copies share a budget; a slow reader that does not fit into the budget is cut off. A body without a lease is
   private already: such a body is not copied, but counts as well once its reader is slow.

`InferenceRoute` is the base of every POST route that runs a model: one place that ends the work of a client that goes
away.

A protocol's route is one subclass, whose `respond` parses the request, runs it and renders the answer.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar, Protocol

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response

from frontend.engine.answer import Answer, CopyBudget
from frontend.http.bodies import until_disconnect
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.settings import Arena

log = logging.getLogger(__name__)

Buffer = bytes | memoryview


class InferenceRoute(ABC):
    """One route; `operation` names it in metrics, logs and traces."""

    operation: ClassVar[str]

    def __init__(self, services: Services) -> None:
        self.services = services

    async def on_post(self, req: Request, resp: Response, target: Any = "", model: str = "") -> None:
        """One request; `target` or `model` comes from the path. Raises a `PenstockError`, which ends the request."""
        scope: RequestScope = req.context.penstock
        scope.operation = self.operation
        await until_disconnect(self.respond(req, resp, scope, target or model), req.scope)

    @abstractmethod
    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> None:
        """Parse, run, render. Cancelled when the client goes away."""


def answer_json(resp: Response, answer: Any) -> None:
    """Answer with `answer` as JSON: structs and plain values, or bytes that are JSON already."""
    resp.content_type = falcon.MEDIA_JSON
    resp.data = answer if isinstance(answer, bytes) else orjson.dumps(answer, default=msgspec.to_builtins)


def send_parts(resp: Response, parts: Sequence[Buffer], answer: Answer, services: Services) -> None:
    """Send `parts` of an answer whose context is open. A body up to one slice is joined here.

    A larger body reads the answer's memory while it leaves, so the answer is handed over to it.
    """
    arena = services.settings.arena
    if sum(len(part) for part in parts) <= arena.slice_bytes:
        resp.data = b"".join(parts)
        return
    body = LeasedBody(parts, answer.hand_over(), arena, services.copies)
    resp.content_length = body.nbytes
    resp.stream = body  # type: ignore[assignment]


class Lease(Protocol):
    """Right to read the views; see `frontend.engine.answer.Answer`."""

    @property
    def leased(self) -> bool:
        """Whether there is memory that the right holds; otherwise all bytes are private."""

    def check(self) -> None:
        """Raise when the bytes just copied may not be used."""

    def release(self) -> None:
        """End the right."""


class LeasedBody:
    """Response body over leased memory, as an async iterator of private slices."""

    def __init__(self, parts: Sequence[Buffer], lease: Lease, settings: Arena, budget: CopyBudget) -> None:
        self._parts: list[Buffer] = [part if isinstance(part, bytes) else part.cast("B") for part in parts]
        self.nbytes = sum(len(part) for part in self._parts)
        self._lease, self._settings, self._budget = lease, settings, budget
        self._at = self._offset = 0
        self._private_nbytes = 0
        self._broken = False
        self._leased = lease.leased
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(settings.lease_copy_after_s, self._keep_private)

    def __aiter__(self) -> AsyncIterator[bytes | bytearray]:
        return self._slices()

    async def _slices(self) -> AsyncIterator[bytes | bytearray]:
        try:
            while self._at < len(self._parts):
                if self._broken:
                    raise ConnectionAbortedError("the client was too slow and no copy could be kept for it")
                piece = self._take(self._settings.slice_bytes)
                if self._leased:
                    self._lease.check()
                if self._at >= len(self._parts):
                    self._end_lease()
                yield piece
        finally:
            self._finish()

    def _take(self, room: int) -> bytes | bytearray:
        part = self._parts[self._at]
        rest = len(part) - self._offset
        if rest >= room:
            piece = bytes(part[self._offset : self._offset + room])
            self._advance(room)
            return piece
        joined = bytearray()
        while self._at < len(self._parts) and len(joined) < room:
            part = self._parts[self._at]
            take = min(room - len(joined), len(part) - self._offset)
            joined += part[self._offset : self._offset + take]
            self._advance(take)
        return joined

    def _advance(self, nbytes: int) -> None:
        self._offset += nbytes
        if self._offset == len(self._parts[self._at]):
            self._parts[self._at] = b""
            self._at, self._offset = self._at + 1, 0

    def _keep_private(self) -> None:
        """The client is slow: count the rest as private, after copying it if it is leased, and end the lease."""
        rest = sum(len(part) for part in self._parts[self._at :]) - self._offset
        if self._budget.take(rest):
            self._private_nbytes = rest
            if self._leased:
                self._copy(rest)
        else:
            log.warning("no room for %d private bytes: a slow client is cut off", rest)
            self._broken, self._parts = True, [b"\0"]
            self._at = self._offset = 0
        self._end_lease()

    def _copy(self, rest: int) -> None:
        self._parts, self._at, self._offset = [memoryview(self._take(rest))] if rest else [], 0, 0
        try:
            self._lease.check()
        except Exception:
            self._broken = True

    def _end_lease(self) -> None:
        self._timer.cancel()
        if self._leased:
            self._leased = False
            self._lease.release()

    def _finish(self) -> None:
        self._end_lease()
        self._budget.give(self._private_nbytes)
        self._private_nbytes = 0
        self._parts = []

    async def close(self) -> None:
        """End the lease, whatever has been sent. Called by Falcon when the response is over or was cut."""
        self._finish()
