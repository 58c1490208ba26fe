"""Two frontends that share a state directory and ask for a key, through the SDKs of OpenAI and Anthropic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from frontend.access import api_keys
from frontend.access.api_keys import KeyEntry
from frontend.access.gate import Gate
from frontend.agent.parts import Parts
from tests.fakes.agent import OFFER, FakeCounts, FakeHost
from tests.fakes.generation_server import RecordedServer
from tests.harness.sdks import Clients, method

OURS, THEIRS = api_keys.fresh(), api_keys.fresh()


class Pair(NamedTuple):
    """Two frontends of one server, by address; the first also as an object, and the host that both have."""

    server: RecordedServer
    urls: tuple[str, str]
    host: FakeHost


@contextmanager
def two_frontends(root: Path) -> Iterator[Pair]:
    """The frontends, which know the keys `OURS` and `THEIRS`. They have one model and one host of tools."""
    gate = Gate(tuple(KeyEntry(name, api_keys.hashed(key)) for name, key in (("a", OURS), ("b", THEIRS))))
    with ExitStack() as stack:
        servers = [
            RecordedServer(_made(root / name), gate, run__state_dir=str(root / "state")) for name in "12"
        ]
        host: Any = FakeHost()
        for server in servers:
            server.engine = server.services.engine = servers[0].engine
            FakeCounts().join(server.services.recorder)
            state = server.services.state
            server.services.agent = Parts(
                OFFER, host, state.files, state.skills, state.sessions, state.approvals
            )
        urls = [stack.enter_context(server.listening()) for server in servers]
        yield Pair(servers[0], (urls[0], urls[1]), host)


def _made(place: Path) -> Path:
    place.mkdir()
    return place


class Sdk:
    """The two frontends through clients of one SDK, in turn."""

    def __init__(self, first: Clients, second: Clients, is_async: bool) -> None:
        self._clients, self.is_async = [first, second], is_async

    def call(self, path: str, *given: Any, then: str = "", **fields: Any) -> Any:
        """What a method of the SDK returns; each call asks the other frontend than the call before.

        `then` names a method of what it returns.
        """
        self._clients.reverse()

        def asked(client: Any) -> Any:
            found = method(client, path)(*given, **fields)
            return getattr(found, then)() if then else found

        return self._clients[0].call(asked)

    def helped(self, path: str, last: str, **fields: Any) -> tuple[list[Any], Any]:
        """(events, final answer) of a helper for streams; the method `last` gives the answer."""
        self._clients.reverse()
        return self._clients[0].helped(lambda client: method(client, path)(**fields), last)

    def content(self, path: str, *given: Any, **fields: Any) -> bytes:
        """The bytes that a method of the SDK fetches."""
        self._clients.reverse()
        found: bytes = self._clients[0].call(lambda client: _fetched(method(client, path)(*given, **fields)))
        return found

    def items(self, path: str, *given: Any, **fields: Any) -> list[Any]:
        """All entries of all pages of a list."""
        self._clients.reverse()
        return self._clients[0].items(lambda client: method(client, path)(*given, **fields))


def _fetched(found: Any) -> Any:
    if inspect.isawaitable(found):
        return _awaited(found)
    return found.read()


async def _awaited(asked: Any) -> Any:
    content = (await asked).read()
    return await content if inspect.isawaitable(content) else content


Connect = Callable[..., AbstractContextManager[Clients]]
"""`of_openai` or `of_anthropic` of `tests.harness.sdks`."""


def sdk_of(stack: ExitStack, pair: Pair, connect: Connect, key: str, *, is_async: bool = False) -> Sdk:
    """Clients of one SDK, which `stack` closes."""
    return Sdk(
        *(stack.enter_context(connect(url, is_async=is_async, key=key)) for url in pair.urls), is_async
    )


def emptied(connect: Connect, objects: str) -> Any:
    """A fixture: an SDK with our key, sync and async, once the `objects` that tests before have left are deleted.

    The fixture takes the frontends from a fixture `pair`.
    """

    @pytest.fixture(params=[False, True], ids=["sync", "async"])
    def sdk(pair: Pair, request: Any) -> Iterator[Sdk]:
        with ExitStack() as stack:
            found = sdk_of(stack, pair, connect, OURS, is_async=request.param)
            for each in found.items(f"{objects}.list"):
                found.call(f"{objects}.delete", each.id)
            yield found

    return sdk
