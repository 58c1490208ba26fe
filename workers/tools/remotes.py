"""The MCP servers of `agent.mcp_config`: their connections, their tools under the names that models see, their calls.

1. Each server has a task that connects, reads the tools, and waits for news. A connection that cannot be made or that
   ends costs this server's tools only; the next try comes after a pause that doubles.
2. A tool `t` of a server with the prefix `p` is `p_t`. Tools that break a bound or a rule of names are left out, and
   the log says so. All tools together are bounded, since each request with functions carries all of them.
3. `use` replaces the configuration. Servers that stand there unchanged keep their connections.
4. A call waits for one of `max_concurrent_calls` places, then for the server's answer, `tool_timeout_secs` in all.
   Answers become text. A server that dies, answers with an error, or does not answer fails the call.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ipc import mcp_servers
from ipc.mcp_servers import Http, McpConfig, McpServer, Process
from ipc.wire.tools import RemoteCall, RemoteResult, Remotes, RemoteTool
from workers.tools.layers import Layers
from workers.tools.processes import Broken, unbroken
from workers.tools.rpc import RemoteFailed, RemoteGone, Session, Transport, shown
from workers.tools.transports import HttpTransport, Program, SocketTransport

log = logging.getLogger(__name__)

MAX_TOOLS = 128
"""Tools of one server."""
MAX_ALL_NBYTES = 512 << 10
"""Names, descriptions and schemas of all tools as JSON."""
MAX_SCHEMA_NBYTES = 32 << 10
MAX_DESCRIPTION_CHARS = 4096
MAX_ANSWER_NBYTES = 256 << 10
MAX_TOLD = 5
"""Tools that are left out and that one line of the log names."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
SETTLED_S = 60.0
"""Age of a connection after whose end the next try comes at once."""
LIST_PAUSE_S = 1.0
"""Pause between two looks at the tools of a server that says that they have changed."""
PING_EVERY_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_KEYWORDS = {
    *("type", "properties", "required", "items", "additionalProperties", "anyOf", "enum", "const"),
    *(
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
    ),
    *("title", "description", "default", "examples", "$schema"),
}
"""What schemas of strict tools may have: all grammars follow these."""
_LEVELS = 16


class _Found(NamedTuple):
    """A tool, and the name that its server knows."""

    tool: RemoteTool
    own_name: str


class Server:
    """One server; `run` keeps its connection, `tools` is what it offers now."""

    def __init__(
        self,
        config: McpConfig,
        server: McpServer,
        transport: Callable[[], Transport],
        news: Callable[[], None],
    ) -> None:
        """`transport` makes a connection; `news` is called when `tools` or `is_connected` has changed."""
        self.name = server.name
        self.entry = config.tool_timeout_secs, server
        self._prefix = mcp_servers.prefix_of(server)
        own_s = None if isinstance(server.source, Process) else server.source.timeout_secs
        self.timeout_s = min(config.tool_timeout_secs, own_s or config.tool_timeout_secs)
        self._transport, self._news = transport, news
        self.session: Session | None = None
        self.tools: list[_Found] = []

    @property
    def is_connected(self) -> bool:
        """Whether the server has told its tools."""
        return self.session is not None

    async def run(self) -> None:
        """Keep a connection until cancelled."""
        pause_s = 0.0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                reason = await self._connection()
            except Exception:
                # The end of one connection, whatever its server has said, must not end the others.
                log.exception("MCP server %s: an unexpected error", shown(self.name))
                reason = "an unexpected error"
            if self.session is not None:
                self.session, self.tools = None, []
                self._news()
            aged = asyncio.get_running_loop().time() - began > SETTLED_S
            pause_s = FIRST_PAUSE_S if aged or not pause_s else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("MCP server %s: %s; the next try comes in %g s", shown(self.name), reason, pause_s)
            await asyncio.sleep(pause_s)

    async def _connection(self) -> str:
        """One connection to its end; why it has ended."""
        session = Session(self._transport())
        try:
            await session.begin(self.timeout_s)
            await self._list(session)
            self.session = session
            log.info("MCP server %s: connected, %d tools", shown(self.name), len(self.tools))
            self._news()
            await self._follow(session)
            return session.reason
        except TimeoutError:
            return f"the server did not answer within {self.timeout_s:g} s"
        except (RemoteGone, RemoteFailed) as error:
            return str(error)
        finally:
            # A cancelled server leaves no program behind either.
            await unbroken(session.close())

    async def _follow(self, session: Session) -> None:
        """Read the tools again when they change, and see that the server answers, until the connection ends."""
        loop = asyncio.get_running_loop()
        while not session.ended.is_set():
            waits = [loop.create_task(each.wait()) for each in (session.changed, session.ended)]
            try:
                await asyncio.wait(waits, timeout=PING_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            if session.changed.is_set():
                session.changed.clear()
                await self._list(session)
                self._news()
                await asyncio.sleep(LIST_PAUSE_S)
            elif not session.ended.is_set():
                await self._ping(session)

    async def _ping(self, session: Session) -> None:
        try:
            await session.request("ping", {}, self.timeout_s)
        except RemoteFailed:
            # An error is an answer too.
            return

    async def _list(self, session: Session) -> None:
        listed, tools, seen, left = (
            await session.tools(self.timeout_s),
            list[_Found](),
            set[str](),
            list[str](),
        )
        for each in listed:
            reason, tool = (
                self._read(each, seen) if len(tools) < MAX_TOOLS else (f"over {MAX_TOOLS} tools", None)
            )
            if tool is None:
                name = each.get("name") if isinstance(each, dict) else None
                left.append(f"{shown(name)} ({reason})")
            else:
                seen.add(tool.own_name)
                tools.append(tool)
        self.tools = tools
        if left:
            unusable = "; ".join(left[:MAX_TOLD])
            log.warning("MCP server %s: %d tools are left out: %s", shown(self.name), len(left), unusable)

    def _read(self, listed: Any, seen: set[str]) -> tuple[str, _Found | None]:
        """A tool of the list, or why it is left out."""
        own_name = listed.get("name") if isinstance(listed, dict) else None
        if not isinstance(own_name, str) or not own_name or own_name in seen:
            return "its name is no text, is empty, or stands twice", None
        name = f"{self._prefix}_{own_name}"
        if not _NAME.fullmatch(name):
            return (
                f"{shown(name)} is no name of a function: 1 to 128 letters, digits, or characters of _.:-",
                None,
            )
        schema = listed.get("inputSchema")
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return "its schema is no schema of an object", None
        nbytes = _nbytes(schema)
        if not nbytes or nbytes > MAX_SCHEMA_NBYTES:
            return f"its schema has over {MAX_SCHEMA_NBYTES} bytes, or too many levels", None
        text = listed.get("description")
        description = text.replace("\0", "")[:MAX_DESCRIPTION_CHARS] if isinstance(text, str) else ""
        return "", _Found(RemoteTool(name, self.name, description, schema, is_plain(schema)), own_name)


def _nbytes(value: Any) -> int:
    """Length of a value as JSON; 0 for a value with more levels than the library writes."""
    try:
        return len(orjson.dumps(value))
    except TypeError:
        return 0


def is_plain(schema: Any, level: int = 0) -> bool:
    """Whether every grammar can follow a schema: few keywords, no references, few levels."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or level > _LEVELS or not schema.keys() <= _KEYWORDS:
        return False
    kind = schema.get("type", "object")
    names = ("object", "array", "string", "number", "integer", "boolean", "null")
    if not isinstance(kind, str) or kind not in names:
        return False
    properties, choices = schema.get("properties", {}), schema.get("anyOf", [])
    if not isinstance(properties, dict) or not isinstance(choices, list):
        return False
    inner = [*properties.values(), *choices]
    inner += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    return all(is_plain(each, level + 1) for each in inner)


class McpServers:
    """All servers of the host. `changed` is called with the present state on every change."""

    def __init__(
        self, config: McpConfig, layers: Layers, root: Path, changed: Callable[[Remotes], None]
    ) -> None:
        """Programs work below `root`."""
        self._changed, self._layers, self._root = changed, layers, root
        self._servers: list[Server] = []
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        self._tools: dict[str, tuple[Server, str]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.state = Remotes(0, [])
        self._take(config)

    def _take(self, config: McpConfig) -> None:
        self._config, self._is_offered = config, config.auto_register_tools
        self._places = asyncio.Semaphore(config.max_concurrent_calls)
        left, self._servers = self._servers, []
        for entry in (each for each in config.servers if each.enabled):
            server = next((one for one in left if one.entry == (config.tool_timeout_secs, entry)), None)
            if server is None:
                server = Server(config, entry, _maker(entry, self._layers, self._root), self._tell)
            else:
                left.remove(server)
            self._servers.append(server)

    def use(self, config: McpConfig) -> None:
        """Keep the connections that `config` names from now on, while `run` runs."""
        if config == self._config:
            return
        log.info("the file of MCP servers has changed")
        self._take(config)
        for server in self._tasks.keys() - {*self._servers}:
            task = self._tasks.pop(server)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._begin()
        self._tell()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        for server in self._servers:
            if server not in self._tasks:
                self._tasks[server] = loop.create_task(server.run())

    async def run(self) -> None:
        """Keep all connections until cancelled."""
        self._begin()
        try:
            await asyncio.Event().wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            # NOTE: those that end already are not cancelled again, or their programs would be left behind.
            await asyncio.gather(*self._tasks.values(), *self._ending, return_exceptions=True)

    def _tell(self) -> None:
        """Collect the tools of all servers. The first server keeps a name that another has too."""
        self._tools, tools, room, left = {}, [], MAX_ALL_NBYTES, 0
        for server in self._servers:
            for offered in server.tools if self._is_offered else ():
                room -= _nbytes([offered.tool.name, offered.tool.description, offered.tool.schema])
                if offered.tool.name in self._tools or room < 0:
                    left += 1
                    continue
                self._tools[offered.tool.name] = server, offered.own_name
                tools.append(offered.tool)
        if left:
            log.warning(
                "%d MCP tools are left out: names are taken, or all tools have over %d bytes",
                left,
                MAX_ALL_NBYTES,
            )
        self.state = Remotes(sum(each.is_connected for each in self._servers), tools)
        self._changed(self.state)

    async def call(self, call: RemoteCall) -> RemoteResult:
        """Run a call. Raises `Broken` with a text for the model."""
        server, own_name = self._tools.get(call.name, (None, ""))
        if server is None or server.session is None:
            raise Broken("the MCP server of this tool is not connected now")
        params = {"name": own_name, "arguments": orjson.Fragment(call.arguments)}
        try:
            async with asyncio.timeout(server.timeout_s):
                async with self._places:
                    session = server.session
                    if session is None:
                        raise RemoteGone("the MCP server of this tool is not connected now")
                    result = await session.request("tools/call", params, server.timeout_s)
        except TimeoutError:
            raise Broken(f"no answer came within {server.timeout_s:g} s") from None
        except (RemoteGone, RemoteFailed) as error:
            raise Broken(str(error)) from None
        text = text_of(result)
        if len(text.encode("utf-8", "replace")) > MAX_ANSWER_NBYTES:
            raise Broken(f"the answer of this tool is over {MAX_ANSWER_NBYTES} bytes")
        return RemoteResult("error" if result.get("isError") is True else "success", text)


def _maker(server: McpServer, layers: Layers, root: Path) -> Callable[[], Transport]:
    source, token = server.source, server.bearer_token
    if isinstance(source, Process):
        return lambda: Program(source, layers, root)
    if isinstance(source, Http):
        return lambda: HttpTransport(source, token)
    return lambda: SocketTransport(source, token)


def text_of(result: dict[str, Any]) -> str:
    """What the model reads of a result: its texts; other content by kind and size."""
    parts = result.get("content")
    texts = [_text_of(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if not texts and "structuredContent" in result:
        content = result["structuredContent"]
        texts = [orjson.dumps(content).decode() if _nbytes(content) else "[content of too many levels]"]
    return "\n".join(texts).replace("\0", "")


def _text_of(part: dict[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    inner = part.get("resource")
    if kind == "resource" and isinstance(inner, dict) and isinstance(inner.get("text"), str):
        return str(inner["text"])
    if kind == "resource_link" and isinstance(part.get("uri"), str):
        return str(part["uri"])
    data = part.get("data")
    size = f", {len(data) * 3 // 4} bytes" if isinstance(data, str) else ""
    return f"[{shown(kind)[1:-1]}{size}, which is not shown]"
