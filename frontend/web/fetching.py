"""Fetches what a URL of a client names, by http and https, without reaching into the networks of the server.

1. `Fetcher.open` checks the URL: scheme, host, no user name and no password. Whoever calls may narrow the hosts.
2. The name is resolved once, by threads of our own. A connection goes to an address of this answer, and the socket of
   each connection is made by the guard (`frontend.web.addresses`), so that no way around a check leads to an address.
3. Each redirect begins again at 1, at most `fetch.max_redirects` times.
4. The body comes in pieces, inflated piece by piece. The bytes that arrive are bounded, and so are the inflated ones.
5. `fetch.timeout_s` bounds all of this together.

No cookies, no credentials, no proxies of the environment, no connections that are used twice.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from frontend.web.addresses import AddressRefused, FetchFailed, Guard, networks_of
from ipc.settings import Fetch
from ipc.version import VERSION

MAX_URL_CHARS = 4096
MAX_AT_ONCE = 16
"""Fetches of one frontend at a time; further ones wait within their time."""
PIECE_NBYTES = 64 << 10
_RESOLVING_THREADS = 4
_REDIRECTS = (301, 302, 303, 307, 308)
_NO_URL = "no valid URL"
_GZIP = 16 + zlib.MAX_WBITS
_HEADERS = {"User-Agent": f"penstock/{VERSION}", "Accept": "*/*", "Accept-Encoding": "gzip"}
Permits = Callable[[str], bool]
"""Whether a host may be fetched from; takes its name in lower case."""


def any_host(host: str) -> bool:
    """Permit all hosts."""
    return True


@dataclass(slots=True)
class Fetched:
    """An answer whose body is still to be read. `url` is the last one of the redirects, `media_type` in lower case.

    `name` is the file name that the server or the URL gives, which may be empty.
    """

    url: str
    media_type: str
    charset: str
    name: str
    most_nbytes: int
    _response: aiohttp.ClientResponse

    async def pieces(self) -> AsyncIterator[bytes]:
        """The inflated body in pieces of at most `PIECE_NBYTES`. Raises `FetchFailed` beyond `most_nbytes`."""
        encoding = self._response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip", ""):
            raise FetchFailed(
                f"the server answered with the content encoding {encoding[:32]!a}, expected gzip or none"
            )
        inflater = _Inflater() if "gzip" in encoding else None
        arrived = given = 0
        async for chunk in self._response.content.iter_chunked(PIECE_NBYTES):
            arrived += len(chunk)
            for piece in (chunk,) if inflater is None else inflater.pieces(chunk):
                given += len(piece)
                if max(arrived, given) > self.most_nbytes:
                    raise FetchFailed(f"the answer has more than {self.most_nbytes} bytes")
                yield piece
                # PERF: a chunk may inflate to a thousand pieces; other requests have their turn between them.
                await asyncio.sleep(0)
        if inflater is not None and not inflater.is_complete:
            raise FetchFailed("the answer broke off")

    async def read(self) -> bytes:
        """The whole body. Raises as `pieces`."""
        return b"".join([piece async for piece in self.pieces()])

    async def beginning(self, nbytes: int) -> bytes:
        """The first bytes of the body; the rest is not read."""
        pieces, length = [], 0
        async for piece in self.pieces():
            pieces.append(piece)
            length += len(piece)
            if length >= nbytes:
                break
        return b"".join(pieces)[:nbytes]


class _Inflater:
    """Inflates gzip in pieces of bounded size."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_GZIP)

    def pieces(self, chunk: bytes) -> Any:
        """What `chunk` inflates to. Raises `FetchFailed` for bytes that are no gzip."""
        while chunk and not self._stream.eof:
            try:
                piece = self._stream.decompress(chunk, PIECE_NBYTES)
            except zlib.error:
                raise FetchFailed("the answer is no valid gzip") from None
            chunk = self._stream.unconsumed_tail
            if piece:
                yield piece

    @property
    def is_complete(self) -> bool:
        """Whether the end of the stream has come."""
        return self._stream.eof


class _Resolver(AbstractResolver):
    """Resolves names once for each connection, in threads of its own, and refuses local ones."""

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard
        self._threads = ThreadPoolExecutor(_RESOLVING_THREADS, thread_name_prefix="resolve")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a host. Raises `OSError`, and `AddressRefused` if any of them is refused."""
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._threads, _addresses, host, port, family)
        if self._guard is not None:
            self._guard.check_name(host, [str(sockaddr[0]) for *_, sockaddr in answers])
        return [
            ResolveResult(
                hostname=host,
                host=str(sockaddr[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, sockaddr in answers
        ]

    async def close(self) -> None:
        """End the threads; a look-up under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str, port: int, family: socket.AddressFamily) -> list[Any]:
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)


class Fetcher:
    """Fetches for one frontend. `is_trusted`: the URLs are the operator's, so all addresses are permitted."""

    def __init__(self, bounds: Fetch, *, is_trusted: bool = False) -> None:
        self._bounds = bounds
        self._guard = None if is_trusted else Guard(networks_of(bounds.allowed_networks))
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(
        self, url: str, *, most_nbytes: int | None = None, permits: Permits = any_host
    ) -> AsyncIterator[Fetched]:
        """The answer to GET of `url`, with at most `most_nbytes` where that is less than `fetch.max_bytes`.

        Raises `FetchFailed`.

        `permits` is asked about the host of the URL and of each redirect.
        """
        bound = self._bounds.max_bytes
        try:
            async with asyncio.timeout(self._bounds.timeout_s), self._free:
                response, at = await self._answer(url, permits)
                try:
                    yield _fetched(response, at, min(most_nbytes or bound, bound))
                finally:
                    response.close()
        except TimeoutError:
            text = f"no complete answer came within {self._bounds.timeout_s:g} s (fetch.timeout_s)"
            raise FetchFailed(text) from None
        except aiohttp.ClientConnectorError as error:
            raise _refusal(error.os_error) from None
        except aiohttp.ClientPayloadError:
            raise FetchFailed("the answer broke off") from None
        except aiohttp.InvalidURL:
            raise FetchFailed(_NO_URL) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _refusal(error) from None

    async def _answer(self, text: str, permits: Permits) -> tuple[aiohttp.ClientResponse, URL]:
        """The answer behind the redirects, with its URL."""
        url = _checked(_parsed(text), permits)
        for _ in range(self._bounds.max_redirects + 1):
            response = await self._client().get(url, allow_redirects=False)
            if response.status not in _REDIRECTS:
                if 200 <= response.status < 300:
                    return response, url
                response.close()
                raise FetchFailed(f"the server answered with status {response.status}")
            response.close()
            url = _checked(_joined(url, response.headers.get("Location", "")), permits)
        raise FetchFailed(f"more than {self._bounds.max_redirects} redirects (fetch.max_redirects)")

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_Resolver(self._guard),
                socket_factory=self._socket,
                use_dns_cache=False,
                force_close=True,
                limit=0,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def _socket(self, place: Any) -> socket.socket:
        """The socket of a connection. Raises `AddressRefused`."""
        family, kind, protocol, _, address = place
        if self._guard is not None:
            self._guard.check(address[0])
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        """End connections and threads."""
        if self._session is not None:
            await self._session.close()


def _parsed(text: str) -> URL:
    if len(text) > MAX_URL_CHARS:
        raise FetchFailed(f"a URL of {len(text)} characters, the limit is {MAX_URL_CHARS}")
    try:
        return URL(text)
    except (ValueError, UnicodeError):
        raise FetchFailed(_NO_URL) from None


def _joined(base: URL, location: str) -> URL:
    if not location:
        raise FetchFailed("the server answered with a redirect to nowhere")
    try:
        return base.join(_parsed(location))
    except (ValueError, UnicodeError):
        raise FetchFailed("the server answered with a redirect to no valid URL") from None


def _checked(url: URL, permits: Permits) -> URL:
    """The URL without its fragment. Raises `FetchFailed` for a URL that is not fetched."""
    try:
        host, port = url.raw_host, url.port
    except ValueError:
        raise FetchFailed(_NO_URL) from None
    if url.scheme not in ("http", "https"):
        raise FetchFailed("expected a URL with the scheme http or https")
    if not host or not port:
        raise FetchFailed("the URL names no host")
    if url.raw_user or url.raw_password:
        raise FetchFailed("a URL with a user name or a password is not fetched")
    if not permits(host.rstrip(".").lower()):
        raise FetchFailed(f"the host {host[:253]!a} is outside of the domains of this request")
    return url.with_fragment(None)


def _refusal(error: BaseException | None) -> FetchFailed:
    """The failure of a connection. What the network said stays here: answers would be a map of local networks."""
    if isinstance(error, AddressRefused):
        return FetchFailed(
            "the host is not on the internet, and fetch.allowed_networks does not name its network"
        )
    return FetchFailed("the host cannot be reached, or does not speak HTTP")


def _fetched(response: aiohttp.ClientResponse, url: URL, most_nbytes: int) -> Fetched:
    if (response.content_length or 0) > most_nbytes:
        raise FetchFailed(f"the answer has {response.content_length} bytes, the limit is {most_nbytes}")
    disposition = response.content_disposition
    name = disposition.filename if disposition is not None and disposition.filename else ""
    name = name or unquote(url.raw_name, errors="replace")
    media_type = response.content_type.lower() if "Content-Type" in response.headers else ""
    return Fetched(str(url), media_type, response.charset or "", name, most_nbytes, response)
