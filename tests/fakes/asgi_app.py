"""A tiny ASGI application for the tests of the HTTP server; each path is one thing that a server has to cope with."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

from frontend.server.protocol import PenstockProtocol

_STATE: dict[str, Any] = {"disconnects": 0, "sending": 0, "stream_nbytes": 0}


def _note(event: str) -> None:
    path = os.environ.get("ASGI_APP_EVENTS")
    if path:
        with Path(path).open("a") as file:
            file.write(f"{event}\n")


async def _lifespan(scope: Any, receive: Any, send: Any) -> None:
    drain = scope.get("state", {}).get("drain")
    while True:
        kind = (await receive())["type"]
        if kind == "lifespan.startup":
            if drain is not None:
                drain.on_begin(lambda: _note("drain"))
            await send({"type": "lifespan.startup.complete"})
        else:
            _note("shutdown")
            await send({"type": "lifespan.shutdown.complete"})
            return


async def _start(send: Any, nbytes: int | None = None) -> None:
    headers = [(b"content-type", b"application/json")]
    if nbytes is not None:
        headers.append((b"content-length", b"%d" % nbytes))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _answer(send: Any, value: Any) -> None:
    body = json.dumps(value).encode()
    await _start(send, len(body))
    await send({"type": "http.response.body", "body": body})


async def _echo(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """The number of bytes received, with the header names the application saw."""
    nbytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            _STATE["disconnects"] += 1
            return
        nbytes, more = nbytes + len(message["body"]), message["more_body"]
    names = [name.decode() for name, _ in scope["headers"]]
    hosts = [value.decode() for name, value in scope["headers"] if name == b"host"]
    await _answer(send, {"nbytes": nbytes, "names": names, "path": scope["path"], "hosts": hosts})


async def _gated(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """A stream that goes on until a file is there, or the drain is over, and ends by saying which of the two."""
    drain, over = scope["state"]["drain"], asyncio.Event()
    drain.streams.add(over.set)
    await _start(send)
    await send({"type": "http.response.body", "body": b"%d\n" % os.getpid(), "more_body": True})
    while not (Path(query["gate"]).exists() or over.is_set()):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    drain.streams.discard(over.set)
    await send({"type": "http.response.body", "body": b"error\n" if over.is_set() else b"end\n"})


async def _unread(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """Answers after a while, or once a file is there, without having read the body."""
    while "gate" in query and not Path(query["gate"]).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    await asyncio.sleep(float(query.get("s", "0")))
    await _answer(send, {"unread": True})


async def _two(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """Head, half a body and the other half in three writes, each in a turn of the loop of its own."""
    await _start(send, 8)
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"half"})


async def _large(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """One body message of `n` bytes."""
    nbytes = int(query["n"])
    await _start(send, nbytes)
    _STATE["sending"] += 1
    await send({"type": "http.response.body", "body": b"x" * nbytes})
    _STATE["sending"] -= 1


async def _stream(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """Streams until the server reports that the client went away."""
    await _start(send)
    await receive()
    gone = asyncio.ensure_future(receive())
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        _STATE["stream_nbytes"] += 65536
        await asyncio.sleep(0)
    _STATE["disconnects"] += gone.result()["type"] == "http.disconnect"


async def _pid(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """Which process answers."""
    await _answer(send, {"pid": os.getpid()})


async def _state(scope: Any, receive: Any, send: Any, query: dict[str, str]) -> None:
    """Counters of this process and the bytes that wait in user space for its slowest reader."""
    waiting = [
        connection.transport.get_write_buffer_size()
        for connection in gc.get_objects()
        if isinstance(connection, PenstockProtocol) and connection.transport is not None
    ]
    await _answer(send, {**_STATE, "pid": os.getpid(), "waiting_nbytes": max(waiting, default=0)})


_PATHS = {
    "/echo": _echo,
    "/gated": _gated,
    "/unread": _unread,
    "/two": _two,
    "/large": _large,
    "/stream": _stream,
    "/pid": _pid,
    "/state": _state,
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI callable."""
    if scope["type"] == "lifespan":
        await _lifespan(scope, receive, send)
    else:
        query = dict(urllib.parse.parse_qsl(scope["query_string"].decode()))
        await _PATHS.get(scope["path"], _echo)(scope, receive, send, query)
