"""`/ws/status`: frames as text messages, built once for all viewers of this frontend, and only for viewers.

With API keys a frame has the runs, recent requests and errors of the viewer's own key, and those of all callers where
the key has the scope `admin`. Arguments of calls are for viewers whom paths of that scope would answer.

1. A handshake from a page of another origin is refused, unless `server.status_origins` names it.
2. The first viewer starts the feed: all workers are asked for `Stats`.
3. Every 200 ms: look at the directory on the loop, read the files and encode the frame in a thread.
4. A slow viewer gets the newest frame next and misses the frames between, so nothing piles up.
5. Messages of a client are read and discarded. A drain ends the stream with 1001.

`/` is the live page for browsers, and `OK` for all other clients. The page is static and holds no data of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import falcon
import falcon.asgi
import msgspec
import orjson
from falcon.asgi import Request, Response, WebSocket

from frontend.access.gate import Grant, same_origin
from frontend.http.inline_page import InlinePage
from frontend.services import Services
from frontend.status.frame import View, build, recent_fields
from frontend.status.history import EVERY_S as POINT_EVERY_S
from frontend.status.history import HistoryFile, Point, Traffic, TrafficReader
from ipc.errors import AccessRefused, Draining, Forbidden, NoReplica, PenstockError, QueueFull

log = logging.getLogger(__name__)

EVERY_S = 0.2
FIRST_LOOKS, LOOK_EVERY_S = 50, 0.01


class Viewer(NamedTuple):
    """Who watches: `owner` is the key whose runs and requests are seen, None for those of all callers.

    `operates`: paths of the scope `admin` would answer this viewer.
    """

    owner: str | None = None
    operates: bool = False


ANYBODY = Viewer()


class Feed:
    """The frames of this frontend."""

    every_s = EVERY_S

    def __init__(self, services: Services) -> None:
        self._services = services
        self._traffic = TrafficReader(services.settings.paths)
        # NOTE: without a supervisor, systemd or the operator decides how many workers there are.
        supervised = os.environ.get("PENSTOCK_SUPERVISE", "1") != "0"
        self._expected = services.settings.worker_count if supervised else 0
        self._viewers = 0
        self._frame, self._number = "", 0
        self._seen: Traffic | None = None
        self._recent: dict[Viewer, str] = {}
        """Runs and recent requests of this frame as JSON, by who sees them."""
        self._history = HistoryFile(services.settings.paths)
        self._points: list[Point] = []
        self._change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def require_place(self) -> None:
        """Raise `QueueFull` when this frontend has `limits.max_status_streams` viewers."""
        limit = self._services.settings.limits.max_status_streams
        if self._viewers >= limit:
            raise QueueFull(f"{limit} status streams are open (limits.max_status_streams)", retry_after_s=5)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count one more viewer, and let the feed run while there is any."""
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield
        finally:
            self._viewers -= 1

    async def frames(self, viewer: Viewer = ANYBODY) -> AsyncIterator[str]:
        """The newest frame, then each time the newest again; ends with the feed.

        A frame brings the points of the history that the viewer has not seen: the first frame all of them.
        """
        seen, told_at = 0, 0.0
        while self._task is not None:
            change = self._change
            if self._number in (0, seen):
                await change.wait()
                continue
            seen = self._number
            fresh = [point for point in self._points if point.at > told_at]
            if fresh:
                told_at = fresh[-1].at
            yield _with_history(self._frame_for(viewer), fresh)

    def _frame_for(self, viewer: Viewer) -> str:
        """The present frame with the runs and recent requests that a viewer sees."""
        if self._seen is None:
            return self._frame
        if viewer not in self._recent:
            fields = recent_fields(self._seen, viewer.owner, operates=viewer.operates)
            self._recent[viewer] = orjson.dumps(fields).decode()
        return f"{self._frame[:-1]},{self._recent[viewer][1:]}"

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._first_stats()
            while self._viewers and not self._services.drain.draining:
                began = loop.time()
                await self._publish()
                await asyncio.sleep(max(self.every_s / 4, self.every_s - (loop.time() - began)))
        except Exception:
            log.exception("the status stream ends")
        finally:
            self._services.directory.watch(False)
            self._task, self._number = None, 0
            self._wake()

    async def _first_stats(self) -> None:
        """Wait a moment for the workers' first answers, so that the first frame is complete."""
        for _ in range(FIRST_LOOKS):
            if self._services.directory.watch(True):
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _publish(self) -> None:
        services = self._services
        services.directory.watch(True)
        services.recorder.flush()
        view = View(services.directory.workers(), *services.engine.ready(), self._expected)
        try:
            frame, self._seen = await asyncio.to_thread(self._encode, view)
        except (OSError, PenstockError) as error:
            log.error("a frame of the status stream was left out: %s", error)
            return
        self._recent = {}
        self._show(frame)

    def _show(self, frame: str) -> None:
        """Give a new frame, a JSON object, to all viewers."""
        self._frame = frame
        self._number += 1
        self._wake()

    def _encode(self, view: View) -> tuple[str, Traffic]:
        self._points = self._history.read().points
        seen = self._traffic.read()
        return orjson.dumps(build(self._services, view, seen)).decode(), seen

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _with_history(frame: str, points: list[Point]) -> str:
    """A frame, which is a JSON object, with a last field of these points."""
    if not points:
        return frame
    history = msgspec.json.encode({"every_s": POINT_EVERY_S, "points": points}).decode()
    return f'{frame[:-1]},"history":{history}}}'


PROTOCOL = "penstock.status"
"""Subprotocol of the page, which offers an API key beside it; clients need not offer any."""
GOING_AWAY = 1001
BROKEN = 1011


class StreamResource:
    """A status stream of this frontend, whose frames `make` gives."""

    def __init__(self, services: Services, make: Callable[[Services], Feed] = Feed) -> None:
        self._services, self._make = services, make
        self._feed: Feed | None = None

    async def on_get(self, req: Request, resp: Response) -> None:
        """The answer that refuses a handshake, else 426, since this address speaks WebSocket only."""
        self._admit(req)
        raise falcon.HTTPError(
            falcon.HTTP_426,
            description=f"{req.path} speaks WebSocket, version 13",
            headers={"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"},
        )

    async def on_websocket(self, req: Request, ws: WebSocket) -> None:
        """Send frames. Raises a `PenstockError` for a handshake that is refused."""
        with self._admit(req).viewer():
            await ws.accept(PROTOCOL if PROTOCOL in ws.subprotocols else None, req.context.common)
            sending = self._send(ws, self._viewer_of(req.context.penstock.grant, req.scope))
            tasks = {asyncio.create_task(sending), asyncio.create_task(_until_gone(ws))}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, req: Request) -> Feed:
        """The feed. Raises a `PenstockError` when no stream may be opened."""
        services = self._services
        if services.drain.draining:
            raise Draining("Service shutting down", retry_after_s=5)
        if not services.started:
            raise NoReplica("this server is starting", retry_after_s=1)
        if not origin_allowed(req.get_header("Origin"), req.netloc, services.settings.server.status_origins):
            raise Forbidden("pages of another origin may not watch this server (server.status_origins)")
        if self._feed is None:
            self._feed = self._make(services)
        self._feed.require_place()
        return self._feed

    def _viewer_of(self, grant: Grant, scope: dict[str, Any]) -> Viewer:
        gate = self._services.access
        if gate.closed:
            return Viewer(None if grant.operates else grant.caller, grant.operates)
        try:
            gate.grant_for(scope, "admin")
        except AccessRefused:
            return ANYBODY
        return Viewer(operates=True)

    async def _send(self, ws: WebSocket, viewer: Viewer) -> None:
        assert self._feed is not None
        with contextlib.suppress(falcon.WebSocketDisconnected, OSError):
            async for frame in self._feed.frames(viewer):
                await ws.send_text(frame)
            await ws.close(GOING_AWAY if self._services.drain.draining else BROKEN)


async def _until_gone(ws: WebSocket) -> None:
    """Read and discard messages of the client until the connection ends."""
    with contextlib.suppress(falcon.WebSocketDisconnected, OSError):
        while True:
            with contextlib.suppress(falcon.PayloadTypeError):
                await ws.receive_text()


def origin_allowed(origin: str | None, host: str, allowed: str) -> bool:
    """Whether a page of `origin` may connect: no origin, the same host and port, or listed in `allowed`."""
    if origin is None:
        return True
    names = [name.strip().rstrip("/").lower() for name in allowed.split(",") if name.strip()]
    if "*" in names or origin.lower() in names:
        return True
    return same_origin(origin, host)


_HTML = Path(__file__).parent / "assets" / "page.html"
_STYLES = ("page.css",)
_SCRIPTS = (
    "asking.js",
    "format.js",
    "elements.js",
    "tip.js",
    "tables.js",
    "past.js",
    "chart.js",
    "health.js",
    "traffic.js",
    "devices.js",
    "models.js",
    "operations.js",
    "generation.js",
    "runs.js",
    "requests.js",
    "errors.js",
    "example.js",
    "try.js",
    "chat.js",
    "vectors.js",
    "stream.js",
)


class PageResource:
    """The page with its style and script inside."""

    def __init__(self) -> None:
        self._page = InlinePage(_HTML, _STYLES, _SCRIPTS)

    async def on_get(self, req: Request, resp: Response) -> None:
        """HTML when Accept names it, else `OK`."""
        resp.append_header("Vary", "Accept")
        if "text/html" not in (req.get_header("Accept") or "").lower():
            resp.content_type = falcon.MEDIA_TEXT
            resp.text = "OK"
            return
        self._page.send(req, resp)

    on_head = on_get
