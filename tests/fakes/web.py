"""A site of the internet that runs here: raw answers by path, and names that lead to the site."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

HERE = "127.0.0.1/32"
"""The network that tests allow."""
_DRIP_S = 0.002


def answer(body: bytes = b"", *, status: int = 200, kind: str = "text/html", **headers: str) -> bytes:
    """An HTTP answer; names of headers have `_` for `-`."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def to(place: str, status: int = 302) -> bytes:
    """A redirect."""
    return answer(status=status, Location=place)


@dataclass(frozen=True)
class Endless:
    """An answer of this type whose body drips to no end behind `beginning`; each byte is told to `dripped`."""

    kind: str
    beginning: bytes
    dripped: Callable[[], None]


Page = bytes | Endless | None


@dataclass
class Site:
    """Answers GET by path; a path that is missing is 404, and None never answers. `heads` are those of requests."""

    pages: dict[str, Page] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    port: int = 0

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        """The URL of a page."""
        return f"http://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        """The paths that were asked for."""
        return [head.split(" ", 2)[1] for head in self.heads]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            page = self.pages.get(head.split(" ", 2)[1].partition("?")[0], answer(status=404))
            if page is None:
                await reader.read()
                return
            if isinstance(page, Endless):
                await _drip(page, writer)
            else:
                writer.write(page)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        """Listen on 127.0.0.1."""
        serving: set[asyncio.Task[None]] = set()

        def serve(*streams: Any) -> None:
            task = asyncio.ensure_future(self._serve(*streams))
            serving.add(task)
            task.add_done_callback(serving.discard)

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield self
            finally:
                for task in serving:
                    task.cancel()
                await asyncio.gather(*serving, return_exceptions=True)


async def _drip(page: Endless, writer: asyncio.StreamWriter) -> None:
    """Write until the client is gone: `OSError`."""
    writer.write(f"HTTP/1.1 200 Whatever\r\nContent-Type: {page.kind}\r\n\r\n".encode() + page.beginning)
    while True:
        writer.write(b"\0")
        await writer.drain()
        page.dripped()
        await asyncio.sleep(_DRIP_S)


def names(table: dict[str, Sequence[str]]) -> Callable[..., list[Any]]:
    """A `getaddrinfo` that knows these names, each with the addresses of its look-ups in turn, the last for ever."""
    turns = {name: [*addresses] for name, addresses in table.items()}

    def getaddrinfo(host: str, port: int, *_: Any) -> list[Any]:
        left = turns.get(host.rstrip("."))
        if left is None:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        addresses = (left.pop(0) if len(left) > 1 else left[0]).split()
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (address, port, 0, 0) if ":" in address else (address, port),
            )
            for address in addresses
        ]

    return getaddrinfo


@contextmanager
def serving_site(pages: Mapping[str, Page]) -> Iterator[Site]:
    """A site on a loop of its own, for tests that block."""
    site, started, ends = Site(dict(pages)), threading.Event(), asyncio.Event()

    async def run() -> None:
        async with site.running():
            started.set()
            await ends.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[run()], name="site", daemon=True)
    thread.start()
    assert started.wait(30), "the site did not start"
    try:
        yield site
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()
