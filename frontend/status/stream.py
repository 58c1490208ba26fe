"""`/ws/status`: the frames of the feed as text messages, until the client or the server goes.

- A handshake from a page of another origin is refused, unless `server.status_origins` names it.
- Whatever a client sends is read and thrown away: the stream is read-only.
- A drain ends the stream with 1001.
"""

from __future__ import annotations

import asyncio
import contextlib

import falcon
from falcon.asgi import Request, Response, WebSocket

from frontend.access.keyless import same_origin
from frontend.services import Services
from frontend.status.feed import Feed
from ipc.errors import Draining, Forbidden, NoReplica

PROTOCOL = "penstock.status"
"""Subprotocol of the page, which offers an API key beside it; clients need not offer any."""
GOING_AWAY = 1001
BROKEN = 1011


class StreamResource:
    """The status stream of this frontend."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._feed: Feed | None = None

    async def on_get(self, req: Request, resp: Response) -> None:
        """What a handshake would be answered, and if with yes: 426, since this address speaks WebSocket only."""
        self._check(req)
        raise falcon.HTTPError(
            falcon.HTTP_426,
            description="/ws/status speaks WebSocket, version 13",
            headers={"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"},
        )

    async def on_websocket(self, req: Request, ws: WebSocket) -> None:
        """Send frames. Raises a `PenstockError` for a handshake that is refused."""
        with self._check(req).viewer():
            await ws.accept(PROTOCOL if PROTOCOL in ws.subprotocols else None, req.context.common)
            tasks = {asyncio.create_task(self._send(ws)), asyncio.create_task(_until_gone(ws))}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, req: Request) -> Feed:
        """The feed. Raises a `PenstockError` when no stream may be opened."""
        services = self._services
        if services.drain.draining:
            raise Draining("Service shutting down", retry_after_s=5)
        if not services.started:
            raise NoReplica("this server is starting", retry_after_s=1)
        if not origin_allowed(req.get_header("Origin"), req.netloc, services.settings.server.status_origins):
            raise Forbidden("pages of another origin may not watch this server (server.status_origins)")
        if self._feed is None:
            self._feed = Feed(services)
        self._feed.check()
        return self._feed

    async def _send(self, ws: WebSocket) -> None:
        assert self._feed is not None
        with contextlib.suppress(falcon.WebSocketDisconnected, OSError):
            async for frame in self._feed.frames():
                await ws.send_text(frame)
            await ws.close(GOING_AWAY if self._services.drain.draining else BROKEN)


async def _until_gone(ws: WebSocket) -> None:
    """Read and forget what the client sends, until it goes."""
    with contextlib.suppress(falcon.WebSocketDisconnected, OSError):
        while True:
            with contextlib.suppress(falcon.PayloadTypeError):
                await ws.receive_text()


def origin_allowed(origin: str | None, host: str, allowed: str) -> bool:
    """Whether a page of `origin` may connect: clients without one, the same host and port, and those in `allowed`."""
    if origin is None:
        return True
    names = [name.strip().rstrip("/").lower() for name in allowed.split(",") if name.strip()]
    if "*" in names or origin.lower() in names:
        return True
    return same_origin(origin, host)
