"""The scripted MCP server (`mcp_program.py`) over streamable HTTP and over a WebSocket, in the loop of the test."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web
from websockets.asyncio.server import ServerConnection, serve

from tests.fakes import mcp_program
from tests.fakes.mcp_program import Script

PROGRAM = {"type": "Process", "command": sys.executable, "args": ["-c", inspect.getsource(mcp_program)]}
"""The source of the program that speaks over its standard input and output."""


def encoded(answer: object) -> str:
    """An answer of a script as it travels."""
    return answer if isinstance(answer, str) else json.dumps(answer)


class HttpServer:
    """Answers with events, or with JSON if `is_json` is set; `status` answers everything else away."""

    def __init__(self) -> None:
        self.script, self.url, self.status, self.is_json = Script(), "", 0, False
        self.sessions: set[str] = set()
        self.requests: list[web.Request] = []
        self.listening: list[web.StreamResponse] = []

    async def post(self, request: web.Request) -> web.StreamResponse:
        """A message of the client."""
        self.requests.append(request)
        if self.status:
            return web.Response(status=self.status, headers={"Location": f"{self.url}/elsewhere"})
        message, headers = orjson.loads(await request.read()), {}
        if message.get("method") == "initialize":
            headers["Mcp-Session-Id"] = f"s{len(self.requests)}"
            self.sessions.add(headers["Mcp-Session-Id"])
        elif request.headers.get("Mcp-Session-Id") not in self.sessions:
            return web.Response(status=404)
        answers = list(map(encoded, self.script.answers(message)))
        if "id" not in message:
            return web.Response(status=202)
        if message.get("method") == "tools/call" and message["params"]["name"] == "wait":
            await asyncio.Event().wait()
        if self.is_json:
            return web.Response(text=answers[-1], content_type="application/json", headers=headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        for answer in answers:
            await response.write(f"event: message\r\ndata: {answer}\r\n\r\n".encode())
        return response

    async def get(self, request: web.Request) -> web.StreamResponse:
        """A stream of the server's own messages."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.listening.append(response)
        await asyncio.Event().wait()
        return response

    async def delete(self, request: web.Request) -> web.Response:
        """The end of a session."""
        self.sessions.discard(request.headers.get("Mcp-Session-Id", ""))
        return web.Response()


@asynccontextmanager
async def http_server() -> AsyncIterator[HttpServer]:
    """A server that listens until the block ends."""
    server, app = HttpServer(), web.Application()
    app.add_routes(
        [web.post("/mcp", server.post), web.get("/mcp", server.get), web.delete("/mcp", server.delete)]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    try:
        yield server
    finally:
        await runner.cleanup()


class SocketServer:
    """One script for each connection."""

    def __init__(self) -> None:
        self.url = ""
        self.connections: list[ServerConnection] = []
        self.scripts: list[Script] = []

    async def serve(self, connection: ServerConnection) -> None:
        """One connection."""
        script = Script()
        self.connections.append(connection)
        self.scripts.append(script)
        async for text in connection:
            for answer in script.answers(orjson.loads(text)):
                await connection.send(encoded(answer))


@asynccontextmanager
async def socket_server() -> AsyncIterator[SocketServer]:
    """A server that listens until the block ends."""
    server = SocketServer()
    subprotocols: list[Any] = ["mcp"]
    async with serve(server.serve, "127.0.0.1", 0, subprotocols=subprotocols, close_timeout=0.1) as listener:
        server.url = f"ws://127.0.0.1:{next(iter(listener.sockets)).getsockname()[1]}/"
        yield server
