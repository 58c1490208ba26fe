"""How answers leave: the base of POST routes that run a model, small bodies, large bodies, and streams of events.

`InferenceRoute` ends the work of a client that goes away. A route is one subclass, whose `respond` parses the request,
runs the request and renders the answer. `answer_json` and `send_parts` send whole answers, `EventStream` streams.

A large body (`LeasedBody`) leaves in slices that are copied as they go:

1. `parts` is a list of private bytes and of views on a leased block. Each slice is a private copy, and the block's
   generation is checked after the copy, so a revoked lease ends the response and never shows another request's data.
2. The lease ends with the last copy. A client that has not taken everything after `lease_copy_after_s` gets the rest
   from a private copy, so a slow reader never holds arena memory.
3. Private copies share a budget; a slow reader that does not fit into the budget is cut off. A body without a lease is
   private already: such a body is not copied, but counts as well once its reader is slow.

A stream (`EventStream`, Server-Sent Events or lines of another form):

1. `begin` waits for the first event, for `idle_s` at most: then the stream opens with the opening of its protocol.
   A failure before is an ordinary error with a status of its own, a later failure ends the stream.
2. An event is asked for when the one before has been written: a client that does not read holds its own stream only.
3. A stream without an event for `idle_s` sends a comment, so that no proxy takes the stream for dead.
4. An error ends the stream with the events that the protocol has for the error. The request is counted at the very end.
5. The end of a drain is such an error, wherever the stream is.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, Protocol

import falcon
import msgspec
import orjson
from falcon.asgi import Request, Response

from frontend.engine.answer import Answer, CopyBudget
from frontend.http import tracebacks
from frontend.http.bodies import until_disconnect
from frontend.records.finishing import Outcome
from frontend.scope import RequestScope
from frontend.services import Services
from ipc.errors import Cancelled, Draining, PenstockError
from ipc.settings import Arena

log = logging.getLogger(__name__)

Buffer = bytes | memoryview
CONTENT_TYPE = "text/event-stream"
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
"""The last event of the streams of OpenAI."""
Opening = Callable[[], bytes]
"""The events that begin a stream whose request still waits."""
RenderError = Callable[[PenstockError], tuple[int, bytes]]
"""(HTTP status to count, events that end the stream) of an error."""


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

    The writer of a larger body reads the answer's memory while the body leaves, and ends the answer's lease.
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


def data(text: bytes) -> bytes:
    """An event without a name. `text` is one line."""
    return b"data: %s\n\n" % text


def named(name: str, text: bytes) -> bytes:
    """An event with a name. `text` is one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), text)


def comment() -> bytes:
    """The opening of protocols without an event for that."""
    return COMMENT


def prepare(resp: Response, content_type: str = CONTENT_TYPE) -> None:
    """The head of a stream: nothing keeps its events, and a proxy of nginx passes each on as it comes."""
    resp.content_type = content_type
    resp.set_header("Cache-Control", "no-cache")
    resp.set_header("X-Accel-Buffering", "no")


class EventStream:
    """The body of a response, as an async iterator; the request is counted when it ends."""

    def __init__(
        self,
        services: Services,
        req: Request,
        events: AsyncGenerator[bytes, None],
        protocol: str,
        render_error: RenderError,
        *,
        idle_s: float,
        idle: bytes = COMMENT,
        opening: Opening = comment,
    ) -> None:
        """`events` are framed and may raise a `PenstockError`; an empty piece says that the stream has begun.

        After `idle_s` seconds without an event `idle` is sent, or `opening` in place of the first event.
        """
        self._services, self._req, self._events = services, req, events
        self._protocol, self._render_error = protocol, render_error
        self._idle, self._opening = idle, opening
        self._scope: RequestScope = req.context.penstock
        self._reader = _Reader(events, idle_s)
        self._first: bytes | None = None
        self._ended = self._finished = False

    async def begin(self) -> None:
        """Wait until the stream opens, or ends. Raises what fails before that; the status is fixed from then on."""
        try:
            first = await self._reader.next()
            self._first = self._opening() if first is None else first
        except StopAsyncIteration:
            self._ended = True
        except BaseException:
            await self._leave_events()
            raise
        self._scope.streams = True
        self._services.drain.streams.add(self._stop)

    def answer(self, resp: Response, content_type: str = CONTENT_TYPE) -> None:
        """Make this the body of `resp`."""
        self._scope.streams = True
        prepare(resp, content_type)
        resp.stream = self

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        """The next event, or a comment."""
        event, self._first = self._first, None
        if event:
            return event
        if self._ended:
            raise StopAsyncIteration
        try:
            return await until_disconnect(self._next(), self._req.scope)
        except StopAsyncIteration:
            self._ended = True
            raise
        except Cancelled as error:
            self._noted(error)
            raise StopAsyncIteration from None
        except PenstockError as error:
            return self._noted(error)
        except Exception as error:
            log.error("%s failed", self._req.path, exc_info=error)
            return self._noted(PenstockError("internal error"))

    async def _next(self) -> bytes:
        while (event := await self._reader.next()) == b"":
            pass
        return self._idle if event is None else event

    def _stop(self) -> None:
        """The drain of this process is over: say so to the client."""
        session = self._scope.session_id
        text = "the server stops, the stream cannot go on"
        self._reader.fail(Draining(f"{text}: continue session {session}" if session else text))

    def _noted(self, error: PenstockError) -> bytes:
        """The last events, of an error; the request is counted with this error."""
        self._ended = True
        tracebacks.forget(error)
        status, events = self._render_error(error)
        self._scope.failed(error, status)
        return events

    async def close(self) -> None:
        """End the work if it still goes on, and count the request. Called by Falcon when the response is over."""
        self._services.drain.streams.discard(self._stop)
        await self._leave_events()
        if not self._finished:
            self._finished = True
            if not self._ended:
                self._noted(self._scope.ended_early())
            outcome = Outcome(self._req.method, self._req.path, self._req.uri_template or "", 200)
            self._services.finisher.finish(self._scope, self._protocol, outcome)

    async def _leave_events(self) -> None:
        await self._reader.close()
        await self._events.aclose()


class _Reader:
    """Asks for events in a task of its own, so that a wait for one can be left and taken up again."""

    def __init__(self, events: AsyncGenerator[bytes, None], idle_s: float) -> None:
        self._events, self._idle_s = events, idle_s
        self._loop = asyncio.get_running_loop()
        self._is_asked = False
        self._found: bytes | BaseException | None = None
        self._failure: PenstockError | None = None
        self._asked: asyncio.Future[None] = self._loop.create_future()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._since = self._loop.time()
        # PERF: one task and one timer for a stream. To make both for each event takes 10 us more.
        self._timer = self._loop.call_later(idle_s, self._look)
        self._task = asyncio.ensure_future(self._read())

    async def next(self) -> bytes | None:
        """The next event; None when nothing has come for the idle time. Raises what the events raise."""
        if not self._is_asked:
            self._is_asked = True
            _wake(self._asked)
        if self._found is None and self._failure is None:
            self._since, self._changed = self._loop.time(), self._loop.create_future()
            await self._changed
        event, self._found = self._found, None
        if event is None and self._failure is not None:
            raise self._failure
        self._is_asked = event is None
        if isinstance(event, BaseException):
            raise event
        return event

    def fail(self, error: PenstockError) -> None:
        """Raise an error in place of what has not come yet."""
        self._failure = error
        _wake(self._changed)

    async def _read(self) -> None:
        while True:
            await self._asked
            self._asked = self._loop.create_future()
            try:
                self._found = await anext(self._events)
            except asyncio.CancelledError as error:
                self._found = error
                raise
            except Exception as error:
                self._found = error
                return
            finally:
                _wake(self._changed)

    def _look(self) -> None:
        """The timer: end a wait that has lasted long enough."""
        left_s = self._since + self._idle_s - self._loop.time()
        if left_s <= 0:
            _wake(self._changed)
            left_s = self._idle_s
        self._timer = self._loop.call_later(left_s, self._look)

    async def close(self) -> None:
        """Leave the events alone, wherever they are."""
        self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
