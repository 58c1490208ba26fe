"""Requests of commands to one running server, and tries until an answer comes."""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from penstock import target, terminal

AGAIN = (429, 502, 503, 504)
"""Statuses of answers after which the same request may succeed."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0


class Reply(msgspec.Struct, frozen=True):
    """One answer. `retry_after_s` is the pause that the server asks for, 0 for none."""

    status: int
    body: bytes
    retry_after_s: float = 0.0

    @property
    def message(self) -> str:
        """The reason of an answer that is no success, in one line."""
        return target.refusal(self.status, self.body)


class Unreachable(Exception):
    """No answer came."""


class Asker:
    """Requests to one server over kept connections, at most `connections` of them."""

    def __init__(self, url: str, key: str, connections: int, timeout_s: float) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._connections = connections
        self._answered = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, limit_per_host=self._connections),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> Reply:
        """The answer to a GET. Raises `Unreachable`."""
        return await self._ask("GET", path, None, {})

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """The answer to a POST. Raises `Unreachable`."""
        return await self._ask("POST", path, body, headers)

    async def post_until_answered(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        tries: int,
        again: Collection[int] = AGAIN,
    ) -> Reply:
        """The first answer other than `again`, or the last of `tries`. Raises `Unreachable`.

        A pause is as long as the server asks for, and doubles where the server asks for none. A server that has
        answered no request yet is tried once: nothing may be running there.
        """
        for number in range(1, tries + 1):
            try:
                reply = await self.post(path, body, headers)
                if reply.status not in again or number == tries:
                    return reply
                pause_s = reply.retry_after_s
            except Unreachable:
                if number == tries or not self._answered:
                    raise
                pause_s = 0.0
            await asyncio.sleep(min(pause_s or _FIRST_PAUSE_S * 2 ** (number - 1), _LONGEST_PAUSE_S))
        raise Unreachable("no try was made")

    def stream(self, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
        """The context of an answer that arrives in parts. May raise `aiohttp.ClientError`, `TimeoutError`."""
        return self._session.post(self.url + path, data=body, headers=headers)

    async def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        try:
            async with self._session.request(method, self.url + path, data=body, headers=headers) as answer:
                self._answered = True
                return Reply(answer.status, await answer.read(), _pause_s(answer.headers.get("Retry-After")))
        except TimeoutError:
            raise Unreachable(f"no answer from {self.url} within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(
                f"no answer from {self.url}: {_why(error)}; is a server running there?"
            ) from error


def _why(error: Exception) -> str:
    """Why no answer came, in the system's words where no connection could be made."""
    if isinstance(error, aiohttp.ClientSSLError):
        # NOTE: its number is of OpenSSL, not of the system.
        return f"no TLS connection could be made, for which https:// asks: {error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.errno or 0
        return os.strerror(number) if number > 0 else error.strerror or str(error)
    return terminal.one_line(str(error)) or type(error).__name__


def _pause_s(header: str | None) -> float:
    """Seconds of a Retry-After: a number or a date (RFC 9110, 10.2.3); 0 for anything else."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
