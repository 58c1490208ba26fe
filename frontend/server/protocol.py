"""One HTTP/1 connection: uvicorn's httptools protocol with states for the sweep and answers to bad requests.

A connection is in one of these states, and the sweep (`frontend.server.serving`) ends those that stay too long:

1. `idle_since`: no byte of a request has arrived since the last one was answered, or since the connection was accepted;
2. `head_since`: a request line or its header fields are arriving;
3. `running`: a request is with the application; its body may still be arriving, more requests may wait in `pipeline`;
4. `lingering_since`: the last answer is written, further bytes are discarded until the client hangs up.

No timer is made per request: uvicorn's keep-alive timer is replaced by the sweep.

A `Cycle` is one request and its response on a connection: uvicorn's cycle with bounded writes and a careful end.

- A body message above `SLICE_BYTES` is written in slices, each after the transport has drained, so that at most
  `WRITE_HIGH_WATER_BYTES + SLICE_BYTES` (plus chunk framing) wait in user space for a slow reader.
- The head leaves with the first piece of the body in one write, so that a process that is killed in between leaves no
  answer cut in two: a proxy could not repeat such a request.
- The response says `Connection: close` when the process drains, or when the request body has not arrived completely.
  That is decided when the response starts, the last moment at which it can be said.
"""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Coroutine, Sized
from functools import partial
from typing import Any

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent, HTTPResponseBodyEvent, HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.http.bodies import BODY_KEY, CALLBACK_KEY, SMALL_NBYTES, note_disconnect
from frontend.server.drain import Drain
from frontend.server.state import (
    FrontendState,
    RefusedRequest,
    encode,
    head_too_large,
    malformed,
    too_many_connections,
)
from frontend.server.websocket import is_handshake
from ipc.errors import LeaseRevoked, PenstockError

SLICE_BYTES = 512 * 1024
WRITE_HIGH_WATER_BYTES = 448 * 1024
_JOINED_BYTES = 64 * 1024
"""PERF: a longer first piece is written behind the head rather than copied with it."""
_VERSIONS = ("1.0", "1.1")
_MAX_LINGERING = 1024
_UNCOUNTED_NBYTES = 64
"""Method, version and line ends, which the limit of a head does not count: how a head is cut up must not matter."""


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


class MeteredFlow(FlowControl):
    """uvicorn's flow control with a clock that stands still while reading is paused.

    `waiting` holds the requests that wait behind the one in work: while there are any, reading stays paused, so that a
    client which never stops sending requests cannot fill memory with them.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self.write_resumed = False
        self._waiting = waiting
        self._read_s = 0.0
        self._reading_since = time.monotonic()

    def reading_s(self, now: float) -> float:
        """Seconds in which the transport was reading, up to `now` (monotonic)."""
        return self._read_s if self.read_paused else self._read_s + now - self._reading_since

    def pause_reading(self) -> None:
        """Stop reading and the clock."""
        if not self.read_paused:
            self._read_s += time.monotonic() - self._reading_since
            super().pause_reading()

    def resume_reading(self) -> None:
        """Start reading and the clock, unless requests are waiting."""
        if self.read_paused and not self._waiting:
            self._reading_since = time.monotonic()
            super().resume_reading()

    def resume_writing(self) -> None:
        """Note that the client took enough of the response for the application to go on."""
        self.write_resumed = True
        super().resume_writing()


class PenstockProtocol(HttpToolsProtocol):
    """The server side of one client connection."""

    server_state: FrontendState
    flow: MeteredFlow
    cycle: Cycle | None  # type: ignore[assignment]
    pipeline: deque[tuple[Cycle, ASGI3Application]]  # type: ignore[assignment]

    def __init__(
        self,
        config: Config,
        server_state: FrontendState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = server_state.limits
        self.drain = server_state.drain
        self.running: Cycle | None = None
        self.idle_since = 0.0
        self.head_since = 0.0
        self.lingering_since = 0.0
        self.body_nbytes = 0
        self.body_mark: tuple[float, int] | None = None
        """Reading time (s) and `body_nbytes` at the start of the period over which the body's rate is averaged."""
        self.stalled_since = 0.0
        self.untaken_nbytes = 0
        """Bytes written but not yet acknowledged by the client when the sweep last saw unsent ones."""
        self._unframed_nbytes = 0
        """Bytes since the start of the message or its last piece of content: what the parser may have to keep."""
        self._host_fields = 0
        self._offers_upgrade = False
        self._postponed: PenstockError | None = None
        self.url = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, or answer 503 if the process has as many as it may have."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self.flow = MeteredFlow(transport, self.pipeline)
        self.idle_since = time.monotonic()
        self.server_state.note_accepted()
        if len(self.connections) > self.limits.max_connections:
            self.refuse(too_many_connections(self.limits.max_connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application; waiting requests are dropped before they start."""
        self.server_state.lingering.discard(self)
        self.pipeline.clear()
        if self.running is not None:
            self.running.disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; bytes that follow a refused request are thrown away."""
        if self.lingering_since or self._postponed:
            return
        if self.idle_since:
            self.head_since = self.idle_since if self.cycle is None else time.monotonic()
            self.idle_since = 0.0
        self._unframed_nbytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, RefusedRequest):
                self._reject(cause.error)
            else:
                self._reject(malformed(f"Malformed request: {error}"))
        else:
            if self._unframed_nbytes > self.limits.max_header_bytes + _UNCOUNTED_NBYTES:
                self._reject(head_too_large(self.limits.max_header_bytes))

    def _should_upgrade(self) -> bool:
        """Take a sound WebSocket handshake, unless requests before it are still to be answered."""
        return (
            super()._should_upgrade()
            and self.running is None
            and not self.pipeline
            and is_handshake(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        )

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers another protocol (such as h2c) as plain HTTP/1.1 (RFC 9110, section 7.8).

        The parser takes all that follows such a head for the other protocol, so it is given the head without the offer.
        """
        fields = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        start = (
            self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()
        )
        self.parser = httptools.HttpRequestParser(self)
        self._offers_upgrade = False
        self.data_received(b"\r\n".join([start, *fields, b"", rest]))

    def on_message_begin(self) -> None:
        """A further request begins."""
        super().on_message_begin()
        self._host_fields = 0
        if not self.head_since:
            self.head_since = time.monotonic()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; a chunked body's trailer fields come here too and are ignored (RFC 9110, section 6.5.1)."""
        if not self.head_since:
            return
        name = name.lower()
        if name == b"host":
            self._host_fields += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait for the one before it.

        Raises:
            RefusedRequest: the head is too large, of another version of HTTP, names no host or several, or too many
                requests wait already.
        """
        version = self.parser.get_http_version()
        self._check_head(version)
        self._unframed_nbytes = 0
        self.head_since = 0.0
        self.scope["method"] = self.parser.get_method().decode("ascii")
        if version != "1.1":
            self.scope["http_version"] = version
        if self.parser.should_upgrade():
            self._offers_upgrade = True
            return
        _set_path(self.scope, self.url, self.root_path)
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        self.cycle = Cycle(self, self.drain, self.linger, keep_alive)
        self.body_nbytes = 0
        self.body_mark = None
        if self.running is None:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _check_head(self, version: str) -> None:
        if version not in _VERSIONS:
            raise RefusedRequest(
                malformed(f"HTTP/{version} is not served here, only {' and '.join(_VERSIONS)}.")
            )
        limit = self.limits.max_header_bytes
        # PERF: the exact size is only computed when the bytes received could be too many.
        if self._unframed_nbytes > limit:
            fields = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + fields > limit:
                raise RefusedRequest(head_too_large(limit))
        if version == "1.1" and self._host_fields != 1:
            raise RefusedRequest(malformed("An HTTP/1.1 request needs exactly one Host field."))
        if self.parser.should_upgrade() and self.parser.get_method() == b"CONNECT":
            raise RefusedRequest(malformed("CONNECT is not served."))
        if len(self.pipeline) >= self.limits.max_pipelined:
            raise RefusedRequest(
                malformed(f"More than {self.limits.max_pipelined} requests wait on this connection.")
            )

    def _start_asgi_task(self, cycle: Cycle, app: ASGI3Application) -> None:  # type: ignore[override]
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """One piece of content."""
        self._unframed_nbytes = 0
        self.body_nbytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has arrived completely; reading goes on, since only a reader sees the client go."""
        self._unframed_nbytes = 0
        if not self._offers_upgrade:
            super().on_message_complete()
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Start the next waiting request, or send a postponed refusal, or become idle."""
        self.server_state.total_requests += 1
        self.running = None
        if self.lingering_since or self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._postponed is not None:
            self.refuse(self._postponed)
        elif self.head_since:
            self.head_since = time.monotonic()
        else:
            self.idle_since = time.monotonic()
        self.flow.resume_reading()

    def _reject(self, error: PenstockError) -> None:
        """Refuse the message being parsed, but not before the valid requests ahead of it are answered."""
        broken = self.cycle if self.cycle is not None and self.cycle.more_body else None
        if broken is not None and self.pipeline and self.pipeline[0][0] is broken:
            self.pipeline.popleft()
        elif self.running is None or self.running is broken:
            self.refuse(error)
            return
        self._postponed = error

    def refuse(self, error: PenstockError) -> None:
        """Answer the request in work, or the one arriving, with an error now, and end the connection.

        If the response has started there is nothing to say; the connection is cut.
        """
        self.pipeline.clear()
        path = self.url.decode("latin-1")
        if self.running is not None:
            path = self.running.scope["path"]
            started = self.running.response_started
            self.running.disconnect()
            if started:
                self.transport.abort()
                return
        self.transport.write(encode(error, path, self.server_state.render, self.limits.version_header))
        self.linger()

    def linger(self) -> None:
        """Send the written bytes, then discard arriving bytes until the client hangs up or the sweep cuts.

        Closing at once with unread data would reset the connection and could take the answer with it
        (RFC 9112, section 9.6).
        """
        if self.lingering_since:
            return
        self.connections.discard(self)
        if len(self.server_state.lingering) >= _MAX_LINGERING or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.lingering_since = time.monotonic()
        self.idle_since = 0.0
        self.head_since = 0.0
        self.server_state.lingering.add(self)
        self.flow.resume_reading()
        self.transport.write_eof()

    def shutdown(self) -> None:
        """Unused: the drain is led by `frontend.server.serving` and the sweep."""


def _set_path(scope: HTTPScope, url: bytes, root_path: str) -> None:
    """Fill in path and query of an origin-form, absolute-form or asterisk-form target (RFC 9112, section 3.2).

    The host of an absolute-form target takes the place of the field `Host` (section 3.2.2). Raises `RefusedRequest` for
    a target with a fragment, which proxies count as a part of the path.
    """
    if b"#" in url:
        raise RefusedRequest(malformed("A request target must not have a fragment."))
    if url == b"*":
        raw_path, query = url, b""
    else:
        parsed = httptools.parse_url(url)
        raw_path, query = parsed.path or b"/", parsed.query or b""
        if parsed.host:
            host = b"[%b]" % parsed.host if b":" in parsed.host else parsed.host
            authority = b"%b:%d" % (host, parsed.port) if parsed.port else host
            fields = [field for field in scope["headers"] if field[0] != b"host"]
            scope["headers"] = [(b"host", authority), *fields]
    path = raw_path.decode("ascii")
    scope["path"] = root_path + (urllib.parse.unquote(path) if "%" in path else path)
    scope["raw_path"] = root_path.encode("ascii") + raw_path
    scope["query_string"] = query
