"""One WebSocket connection: uvicorn's protocol with an end that never waits for the client.

- `is_handshake` accepts offers; requests with other offers are served as plain HTTP (RFC 9110, section 7.8).
- A drain says goodbye with 1001 (going away, RFC 6455, section 7.4.1).
- After the closing frame, and after an unanswered ping, the connection is cut `FAREWELL_S` later at the latest, so
  that a client that reads nothing holds neither memory nor a drain.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from asyncio.transports import BaseTransport
from collections.abc import Iterable
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from frontend.server.state import FrontendState, draining, encode, malformed
from ipc.errors import PenstockError

FAREWELL_S = 1.0
GOING_AWAY = 1001
WRITE_HIGH_WATER_BYTES = 64 * 1024
_VERSION = b"13"
_KEY_NBYTES = 16


def is_handshake(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request that offers `Upgrade: websocket` is a sound opening handshake (RFC 6455, section 4.2.1)."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in fields and name.startswith(b"sec-websocket-") and name != b"sec-websocket-protocol":
            return False
        fields[name] = value
    try:
        key = binascii.a2b_base64(fields.get(b"sec-websocket-key", b""), strict_mode=True)
    except binascii.Error:
        return False
    return (
        method == b"GET"
        and version == "1.1"
        and fields.get(b"sec-websocket-version") == _VERSION
        and len(key) == _KEY_NBYTES
        and b"transfer-encoding" not in fields
        and fields.get(b"content-length", b"0") == b"0"
    )


class PenstockWebSocket(WebSocketsSansIOProtocol):
    """The server side of one WebSocket."""

    def __init__(
        self,
        config: Config,
        server_state: FrontendState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._version_header, self._render = server_state.limits.version_header, server_state.render
        # NOTE: at the level debug the library logs all header fields, uvicorn the whole address; both may hold a key.
        self.conn.debug = False
        self.logger = logging.getLogger("websockets")

    def connection_made(self, transport: BaseTransport) -> None:
        """Take the connection over; little waits in user space for a slow reader."""
        super().connection_made(transport)
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, which gets the whole head at once: a head that it does not take is refused."""
        super().data_received(data)
        if not self.handshake_initiated:
            self._refuse(malformed("The WebSocket handshake has too many or too long header fields."))

    def send_receive_event_to_app(self) -> None:
        """Hand a message on; a text that is no UTF-8 ends the connection with 1007 (RFC 6455, section 8.1)."""
        try:
            b"".join(self.frames if self.curr_msg_data_type == "text" else ()).decode()
        except UnicodeDecodeError:
            # NOTE: uvicorn logs a stack, and fails where a closing frame came along with the text.
            self.frames = []
            if not self.close_sent:
                self.conn.fail(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """What the client sent is no WebSocket any more: say so and close."""
        super().handle_parser_exception()
        self._cut_soon()

    async def send(self, message: ASGISendEvent) -> None:
        """Write one ASGI message, once the client has taken enough of what was written before.

        Raises:
            ClientDisconnected: the connection is gone, or the closing frame is sent.
        """
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            # NOTE: a refused handshake is answered too; otherwise uvicorn logs an error about it.
            self.handshake_complete = True
            self._cut_soon()

    def keepalive_timeout(self) -> None:
        """The client did not answer a ping."""
        super().keepalive_timeout()
        self._cut_soon()

    def shutdown(self) -> None:
        """The process drains: say goodbye, or refuse a handshake that is not answered yet."""
        self.stop_keepalive()
        if not self.handshake_complete:
            self._refuse(draining())
        elif not self.close_sent:
            self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
            self.conn.send_close(GOING_AWAY, "the server is stopping")
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._cut_soon()

    def _refuse(self, error: PenstockError) -> None:
        self.handshake_complete = self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": 1006})
        self.transport.write(encode(error, "/", self._render, self._version_header))
        self.transport.close()

    def _cut_soon(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(FAREWELL_S, self.transport.abort)
