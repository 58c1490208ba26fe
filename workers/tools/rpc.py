"""The client's side of MCP: JSON-RPC 2.0 over any transport, the handshake, the list of tools, calls of tools.

1. A `Transport` carries whole messages. `Session.request` sends a request and waits for the answer with its id.
2. `Session.begin` is the handshake. `Session.tools` follows the pages of the list of tools.
3. A request that is given up, by its time or by its caller, is cancelled at the server.
4. When the transport ends, every request under way fails with `RemoteGone`, once. No request is sent again.

A server is another program and may say anything: messages, pages and tools are bounded, ids that nobody waits for are
dropped, and requests of the server other than `ping` are answered with an error. The protocol is that of
modelcontextprotocol.io, revision 2025-11-25, and earlier ones.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import orjson

from ipc.mcp_servers import REVISIONS
from ipc.version import VERSION

MAX_MESSAGE_NBYTES = 4 << 20
MAX_PAGES = 64
MAX_LISTED = 4096
MAX_UNASKED = 1000
"""Messages that a server may send on its own between two answers, and answers of this side that it has not taken."""
MAX_ID_CHARS = 256
"""Longest id of a request of the server: the answer repeats the id."""
MAX_SHOWN = 300
"""Characters of a server's text in messages of this side."""
_METHOD_NOT_FOUND = -32601


class RemoteGone(Exception):
    """There is no connection; the text says why."""


class RemoteFailed(Exception):
    """One request has failed, and the connection stays; the text says why."""


class Transport(ABC):
    """Carries messages to one server. `session` is set before `open`."""

    session: Session

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises `RemoteGone`."""

    @abstractmethod
    async def send(self, message: bytes, id_: int | None) -> None:
        """Send a message; `id_` is that of a request.

        A transport that answers in the same exchange returns after the answer. Raises `RemoteGone`, `RemoteFailed`.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the connection, and what it holds. Safe before `open`."""

    def settled(self, revision: str) -> None:
        """The handshake has settled the revision of the protocol."""
        return


class Session:
    """One connection. `changed` is set when the server says that its tools have changed, `ended` at the end."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        transport.session = self
        self.changed, self.ended = asyncio.Event(), asyncio.Event()
        self.reason = ""
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = self._unasked = 0

    async def begin(self, timeout_s: float) -> None:
        """Connect and shake hands. Raises `RemoteGone`, `RemoteFailed`, `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._transport.open()
        client = {"name": "penstock", "version": VERSION}
        params = {"protocolVersion": REVISIONS[0], "capabilities": {}, "clientInfo": client}
        answer = await self.request("initialize", params, timeout_s)
        revision = answer.get("protocolVersion")
        if revision not in REVISIONS:
            raise RemoteFailed(f"the server speaks {shown(revision)}, and not {', '.join(REVISIONS)}")
        self._transport.settled(revision)
        async with asyncio.timeout(timeout_s):
            await self._transport.send(_encoded("notifications/initialized", {}), None)

    async def tools(self, timeout_s: float) -> list[Any]:
        """All tools as the server lists them, `MAX_LISTED` at most. Raises as `request`."""
        listed: list[Any] = []
        cursors: set[str] = set()
        params: dict[str, Any] = {}
        while True:
            page = await self.request("tools/list", params, timeout_s)
            tools, cursor = page.get("tools"), page.get("nextCursor")
            if not isinstance(tools, list):
                raise RemoteFailed("the server's list of tools is no list")
            listed += tools
            is_more = isinstance(cursor, str) and cursor not in cursors
            if not is_more or len(listed) >= MAX_LISTED or len(cursors) + 1 >= MAX_PAGES:
                return listed[:MAX_LISTED]
            assert isinstance(cursor, str)
            cursors.add(cursor)
            params = {"cursor": cursor}

    async def request(self, method: str, params: Any, timeout_s: float) -> dict[str, Any]:
        """The result of a request. Raises `RemoteGone`, `RemoteFailed`, `TimeoutError`."""
        if self.ended.is_set():
            raise RemoteGone(self.reason)
        self._next = number = self._next + 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        sending = self._start(self._send(number, _encoded(method, params, number)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            if method != "initialize" and not self.ended.is_set():
                self._start(self._notify("notifications/cancelled", {"requestId": number}))
            raise
        finally:
            self._waiting.pop(number, None)
            sending.cancel()

    async def _send(self, number: int, message: bytes) -> None:
        try:
            await self._transport.send(message, number)
        except RemoteGone as error:
            self.end(str(error))
        except RemoteFailed as error:
            self._fail(number, error)

    async def _notify(self, method: str, params: Any) -> None:
        await self._reply(_encoded(method, params))

    async def _reply(self, message: bytes) -> None:
        try:
            await self._transport.send(message, None)
        except RemoteGone as error:
            self.end(str(error))
        except RemoteFailed:
            return

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _fail(self, number: int, error: Exception) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_exception(error)

    def receive(self, text: bytes | str) -> None:
        """A message of the server, or a list of messages; called by the transport."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            self.end("the server sent something that is no JSON")
            return
        for message in value if isinstance(value, list) else [value]:
            if not self.ended.is_set():
                self._take(message)

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            self.end("the server sent something that is no message")
            return
        number, method = message.get("id"), message.get("method")
        future = self._waiting.get(number) if isinstance(number, int) else None
        if method is None and future is not None:
            self._unasked = 0
            if not future.done():
                _settle(future, message)
            return
        self._unasked += 1
        if self._unasked > MAX_UNASKED:
            self.end(f"the server sent over {MAX_UNASKED} messages that nobody has asked for")
        elif method == "notifications/tools/list_changed":
            self.changed.set()
        elif isinstance(method, str) and isinstance(number, int | str):
            self._answer(method, number)

    def _answer(self, method: str, number: int | str) -> None:
        """Answer a request of the server, which may not read the answers."""
        if isinstance(number, str) and len(number) > MAX_ID_CHARS:
            self.end(f"the server sent a request whose id has over {MAX_ID_CHARS} characters")
        elif len(self._tasks) - len(self._waiting) > MAX_UNASKED:
            self.end(f"the server takes no answers: {MAX_UNASKED} of them wait")
        else:
            self._start(self._reply(_reply_to(method, number)))

    def end(self, reason: str) -> None:
        """The connection has ended; called by the transport as well."""
        if self.ended.is_set():
            return
        self.reason = reason
        self.ended.set()
        for number in list(self._waiting):
            self._fail(number, RemoteGone(reason))

    async def close(self) -> None:
        """End the connection."""
        self.end("the connection was closed")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.close()


def _settle(future: asyncio.Future[dict[str, Any]], message: dict[str, Any]) -> None:
    result, error = message.get("result"), message.get("error")
    if isinstance(result, dict):
        future.set_result(result)
    elif isinstance(error, dict):
        future.set_exception(
            RemoteFailed(f"the server answered with an error: {shown(error.get('message'))}")
        )
    else:
        future.set_exception(RemoteFailed("the server's answer has neither a result nor an error"))


def _encoded(method: str, params: Any, number: int | None = None) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    return orjson.dumps(message if number is None else {**message, "id": number})


def _reply_to(method: str, number: int | str) -> bytes:
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": number}
    if method == "ping":
        return orjson.dumps({**answer, "result": {}})
    return orjson.dumps({**answer, "error": {"code": _METHOD_NOT_FOUND, "message": "method not found"}})


def shown(value: Any) -> str:
    """A text of a server for messages and logs: printable, in quotes, and cut."""
    return ascii(value[:MAX_SHOWN] if isinstance(value, str) else value)[: MAX_SHOWN + 2]
