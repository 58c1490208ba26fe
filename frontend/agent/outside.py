"""Tools that other programs run: who runs a tool by the tool's source, MCP servers, the operator's dispatch URL.

A `Backend` runs all tools of one source (`Tool.source`). Built-in tools run in the workplace of their run instead.

`Remote` hands a call to the tool host, which keeps the connections to MCP servers.

`Dispatch` sends a call as `POST {"name", "arguments"}` to the URL that the operator has set:

1. The answer is a text, a JSON string, or a JSON object with `content`.
2. Another status, no answer, and an answer that is late, too large or of another form give the model an error.
3. Redirects are not followed, proxies of the environment are not used, and no call is sent twice.

The rules on addresses of files do not hold here: the URL is the operator's.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import orjson

from frontend.agent import results
from frontend.agent.host import ToolHost
from frontend.agent.results import Answer
from frontend.agent.tools import Tool
from ipc.errors import ToolFault
from ipc.wire.tools import RemoteCall, RemoteResult

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

MAX_ANSWER_NBYTES = 256 << 10
"""Longest answer of a tool of another program, as the model has to read the answer."""
NO_JSON = "the arguments are no JSON"


class Backend(ABC):
    """Runs the tools of one source, for all requests of a frontend."""

    @abstractmethod
    async def run(self, tool: Tool, text: str) -> Answer:
        """The answer of a call with these arguments, JSON text. A call that fails has an answer that says so."""

    async def close(self) -> None:
        """Close what is held open."""
        return


class Remote(Backend):
    """The MCP servers of the tool host."""

    def __init__(self, host: ToolHost) -> None:
        self._host = host

    async def run(self, tool: Tool, text: str) -> Answer:
        """Have the host call the tool. Arguments are checked by the server, and have to be an object."""
        text = text or "{}"
        try:
            if not isinstance(orjson.loads(text), dict):
                return results.failed(tool, "the arguments are no object")
            done, _ = await self._host.run("", RemoteCall(tool.name, text), lasting=False)
        except orjson.JSONDecodeError:
            return results.failed(tool, NO_JSON)
        except ToolFault as error:
            return results.failed(tool, error.message)
        assert isinstance(done.result, RemoteResult)
        return results.said(done.result.text, done.result.status)


class Failure(Exception):
    """A call that gave nothing; the text is for the model."""


class Dispatch(Backend):
    """The dispatch URL."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` bounds a call with its answer. The connections open with the first call."""
        self._url, self._timeout_s = url, timeout_s
        self._session: ClientSession | None = None

    async def run(self, tool: Tool, text: str) -> Answer:
        """Send a call, and wait for the answer."""
        from aiohttp import ClientError

        try:
            arguments = orjson.loads(text or "{}")
            async with asyncio.timeout(self._timeout_s):
                return results.said(await self._post(tool.name, arguments))
        except orjson.JSONDecodeError:
            return results.failed(tool, NO_JSON)
        except Failure as error:
            return results.failed(tool, str(error))
        except TimeoutError:
            return results.failed(tool, f"no answer came within {self._timeout_s:g} s")
        except (ClientError, OSError, ValueError):
            # NOTE: messages of these errors name the operator's address, which is not for the model.
            return results.failed(tool, "the program that runs this tool does not answer")

    async def _post(self, name: str, arguments: Any) -> str:
        body = _encoded({"name": name, "arguments": arguments}, "the arguments have")
        async with self._open().post(self._url, data=body, allow_redirects=False) as answer:
            if not 200 <= answer.status < 300:
                raise Failure(f"the program that runs this tool answered with status {answer.status}")
            return _text_of(await _bounded(answer))

    def _open(self) -> ClientSession:
        if self._session is None:
            import aiohttp

            # NOTE: a small answer could unfold to any size, so answers come as they are.
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(
                headers=headers,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def _bounded(answer: ClientResponse) -> bytes:
    """The body of an answer. Raises `Failure` for a body that is too large."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_NBYTES:
            raise Failure(f"the answer of this tool is over {MAX_ANSWER_NBYTES} bytes")
    return bytes(body)


def _encoded(value: Any, what: str) -> bytes:
    """A value as JSON. Raises `Failure`: the library reads more levels than it writes."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        raise Failure(f"{what} too many levels") from None


def _text_of(body: bytes) -> str:
    """What the model reads of an answer. Raises `Failure`."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return body.decode().replace("\0", "")
        except UnicodeDecodeError:
            raise Failure("the answer of this tool is no text") from None
    if isinstance(value, dict):
        value = value.get("content")
        value = (
            value
            if isinstance(value, str | None)
            else _encoded(value, "the answer of this tool has").decode()
        )
    if not isinstance(value, str):
        raise Failure("the answer of this tool is neither a text nor an object with content")
    return value.replace("\0", "")
