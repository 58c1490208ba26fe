"""Runs the same call through the sync and the async client of an SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

Make = Callable[[Any], Any]
"""What a test asks of a client; an awaitable, if the client is async."""


class Clients:
    """One client; an async one runs on a loop of its own."""

    def __init__(self, client: Any, runner: asyncio.Runner | None) -> None:
        self._client, self._runner = client, runner

    def call(self, make: Make) -> Any:
        """What a call returns."""
        found = make(self._client)
        return found if self._runner is None else self._runner.run(_awaited(found))

    def items(self, make: Make) -> list[Any]:
        """All items of what a call returns: events of a stream, or entries of all pages."""
        found = make(self._client)
        return list(found) if self._runner is None else self._runner.run(_collected(found))

    def helped(self, make: Make, last: str) -> tuple[list[Any], Any]:
        """(events, final answer) of a stream that is a context; the method `last` gives the answer."""
        found = make(self._client)
        if self._runner is not None:
            return self._runner.run(_helped(found, last))
        with found as stream:
            return list(stream), getattr(stream, last)()


@contextmanager
def clients(kind: Callable[..., Any], *, is_async: bool, **options: Any) -> Iterator[Clients]:
    """A client of an SDK; `options` are those of its class."""
    if not is_async:
        with kind(**options) as client:
            yield Clients(client, None)
        return
    with asyncio.Runner() as runner:
        client = kind(**options)
        yield Clients(client, runner)
        runner.run(client.close())


async def _awaited(value: Any) -> Any:
    return await value


async def _collected(found: Any) -> list[Any]:
    if isinstance(found, Coroutine):
        found = await found
    return [item async for item in found]


async def _helped(found: Any, last: str) -> tuple[list[Any], Any]:
    async with found as stream:
        return [event async for event in stream], await getattr(stream, last)()
