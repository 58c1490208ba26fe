"""One request and its response on a connection: uvicorn's cycle with bounded writes and a careful end.

- A body message above `SLICE_BYTES` is written in slices, each after the transport has drained, so that at most
  `WRITE_HIGH_WATER_BYTES + SLICE_BYTES` (plus chunk framing) wait in user space for a slow reader.
- The head leaves with the first piece of the body in one write, so that a process that is killed in between leaves no
  answer cut in two: a proxy could not repeat such a request.
- The response says `Connection: close` when the process drains, or when the request body has not arrived completely.
  That is decided when the response starts, the last moment at which it can be said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent, HTTPResponseBodyEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.http.bodies import BODY_KEY, SMALL_NBYTES
from frontend.http.disconnect import CALLBACK_KEY, note_disconnect
from frontend.server.drain import Drain
from ipc.errors import LeaseRevoked

SLICE_BYTES = 512 * 1024
WRITE_HIGH_WATER_BYTES = 448 * 1024
_JOINED_BYTES = 64 * 1024
"""PERF: a longer first piece is written behind the head rather than copied with it."""


class _LingeringClose:
    """Stands in for the transport of a cycle whose request body is unread: closing it goes through `linger`."""

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = linger


class HeadWithBody:
    """Stands in for the transport of a response: holds the head until the next write, or the next turn of the loop."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._head = transport, b""
        self.is_closing = transport.is_closing
        self._later: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """The first call brings the head."""
        if self._later is None:
            self._head, self._later = data, asyncio.get_running_loop().call_soon(self.flush)
        elif self._head and len(data) <= _JOINED_BYTES:
            self._transport.write(self._taken() + data)
        else:
            self.flush()
            self._transport.write(data)

    def flush(self) -> None:
        """Write the head if it is still held; a client that has left meanwhile gets nothing."""
        if self._head:
            head = self._taken()
            if not self.is_closing():
                self._transport.write(head)

    def close(self) -> None:
        """Write the held bytes and close."""
        self.flush()
        self._transport.close()

    def _taken(self) -> bytes:
        assert self._later is not None
        self._later.cancel()
        head, self._head = self._head, b""
        return head


class Cycle(RequestResponseCycle):
    """The ASGI side of one HTTP request."""

    def __init__(
        self, protocol: HttpToolsProtocol, drain: Drain, linger: Callable[[], None], keep_alive: bool
    ) -> None:
        """`linger` ends the connection once the client has hung up."""
        super().__init__(
            scope=protocol.scope,
            transport=protocol.transport,
            flow=protocol.flow,
            logger=protocol.logger,
            access_logger=protocol.access_logger,
            access_log=protocol.access_log,
            default_headers=protocol.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=protocol.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self._complete,
        )
        self._protocol, self._drain, self._linger = protocol, drain, linger
        self._received = False
        protocol.scope[CALLBACK_KEY] = None  # type: ignore[literal-required]

    async def run_asgi(self, app: ASGI3Application) -> None:
        """Run the application. A response that cannot go on ends its connection; that is no bug and prints no stack."""
        await super().run_asgi(partial(self._run, app))

    async def _run(self, app: ASGI3Application, scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except (ConnectionAbortedError, LeaseRevoked) as error:
            if not self.response_started:
                raise
            self.logger.info("a response is cut off: %s", error)
            self._give_up()
        except asyncio.CancelledError:
            if not (self.response_started or self.disconnected):
                raise
            self._give_up()

    def _give_up(self) -> None:
        self.transport.close()
        # What uvicorn asks before it reports that the response is not complete.
        self.disconnected = True

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        """Write one ASGI message; the coroutine waits while the client has not taken what was written before."""
        if not self.response_started:
            self._settle_connection()
        elif message["type"] == "http.response.body" and len(message.get("body", b"")) > SLICE_BYTES:
            return self._send_sliced(message["body"], message.get("more_body", False))
        return super().send(message)

    async def receive(self) -> ASGIReceiveEvent:
        """The next event. A body that is small and has arrived whole is put into the scope as well."""
        first, self._received = not self._received, True
        if not first or self.more_body or self.disconnected or len(self.body) > SMALL_NBYTES:
            return await super().receive()
        body = bytes(self.body)
        self.scope[BODY_KEY] = body  # type: ignore[literal-required]
        self.waiting_for_100_continue = False
        self.body = bytearray()
        self.message_event.clear()
        return {"type": "http.request", "body": body, "more_body": False}

    def _settle_connection(self) -> None:
        if self.more_body:
            self.keep_alive = False
            self.transport = _LingeringClose(self._protocol.transport, self._linger)  # type: ignore[assignment]
        elif self._drain.draining and not self._protocol.pipeline:
            self.keep_alive = False
        self.transport = HeadWithBody(self.transport)  # type: ignore[assignment]

    def _complete(self) -> None:
        if isinstance(self.transport, HeadWithBody):
            self.transport.flush()
        self._protocol.on_response_complete()

    async def _send_sliced(self, body: bytes | memoryview, more_body: bool) -> None:
        view = memoryview(body).cast("B")
        last = (len(view) - 1) // SLICE_BYTES * SLICE_BYTES
        for start in range(0, last, SLICE_BYTES):
            piece = view[start : start + SLICE_BYTES]
            await super().send(_body_event(piece, True))
        await super().send(_body_event(view[last:], more_body))

    def disconnect(self) -> None:
        """Tell the application that the client has left before the end of the response."""
        if not self.response_complete:
            self.disconnected = True
            self.waiting_for_100_continue = False
        self.message_event.set()
        note_disconnect(self.scope)


def _body_event(body: bytes | memoryview, more_body: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": body, "more_body": more_body}  # type: ignore[typeddict-item]
