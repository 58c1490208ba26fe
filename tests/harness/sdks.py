"""Runs the same call through the sync and the async client of an SDK, that of OpenAI or that of Anthropic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tests.harness.later import anthropic, openai

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


def of_openai(url: str, *, is_async: bool, key: str = "unused") -> AbstractContextManager[Clients]:
    """A client of OpenAI's SDK that never asks twice."""
    kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
    return clients(kind, is_async=is_async, base_url=f"{url}/v1", api_key=key, max_retries=0)


def of_anthropic(url: str, *, is_async: bool, key: str = "unused") -> AbstractContextManager[Clients]:
    """A client of Anthropic's SDK that never asks twice."""
    kind: Any = anthropic.AsyncAnthropic if is_async else anthropic.Anthropic
    return clients(kind, is_async=is_async, base_url=url, api_key=key, max_retries=0)


def method(client: Any, path: str) -> Any:
    """The method of a client with this dotted name."""
    for name in path.split("."):
        client = getattr(client, name)
    return client


async def _awaited(value: Any) -> Any:
    return await value


async def _collected(found: Any) -> list[Any]:
    if isinstance(found, Coroutine):
        found = await found
    return [item async for item in found]


async def _helped(found: Any, last: str) -> tuple[list[Any], Any]:
    async with found as stream:
        return [event async for event in stream], await getattr(stream, last)()
