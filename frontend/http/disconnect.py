"""Ends work when its client goes away.

`CALLBACK_KEY` of the ASGI scope holds None while no work runs, a function to call at the disconnect while work runs,
`GONE` after the disconnect. Penstock's own server sets the key from the connection, at no cost while the client stays.
Another ASGI server sends an event only: `noting` sets `GONE` when the event is received, and a second task waits for
the event while work runs and the body has been read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from ipc.errors import Cancelled

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

CALLBACK_KEY = "penstock.disconnected"
_EVENTS_KEY = "penstock.events"
GONE = object()


def note_disconnect(scope: Any) -> None:
    """The client of `scope` has gone: remember that, and end the work for the client."""
    callback = scope.get(CALLBACK_KEY)
    scope[CALLBACK_KEY] = GONE
    if callback is not None and callback is not GONE:
        callback()


def is_gone(scope: Any) -> bool:
    """Whether the client of `scope` has gone, as far as the server knows."""
    return scope.get(CALLBACK_KEY) is GONE


def noting(scope: Any, receive: Receive) -> Receive:
    """`receive` of a server that does not call back, made to note the disconnect in `scope`."""
    scope[CALLBACK_KEY], scope[_EVENTS_KEY] = None, (events := _Events(scope, receive))
    return events.receive


async def until_disconnect(work: Coroutine[Any, Any, T], scope: dict[str, Any]) -> T:
    """The result of `work`. Raises `Cancelled` when the client of `scope` went away first; `work` is cancelled then.

    A request has one such work at a time: what it calls runs under the same watch.
    """
    if scope.get(CALLBACK_KEY) is GONE:
        work.close()
        raise Cancelled("the client went away")
    task = asyncio.current_task()
    assert task is not None
    events: _Events | None = scope.get(_EVENTS_KEY)
    scope[CALLBACK_KEY] = task.cancel
    if events is not None:
        events.watch()
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone(scope):
            raise
        task.uncancel()
        raise Cancelled("the client went away") from None
    finally:
        if scope[CALLBACK_KEY] is not GONE:
            scope[CALLBACK_KEY] = None
        if events is not None:
            events.leave()


class _Events:
    """The events of one request. One reader at a time waits for them: Falcon until the body is read, then this."""

    def __init__(self, scope: Any, receive: Receive) -> None:
        self._scope, self._receive = scope, receive
        self._body_left = self._watched = False
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        """The next event, which is noted."""
        event = await self._receive()
        if event["type"] == "http.disconnect":
            note_disconnect(self._scope)
            return event
        self._body_left = bool(event.get("more_body"))
        if self._watched and self._watcher is None:
            self.watch()
        return event

    def watch(self) -> None:
        """Work runs: wait for the disconnect as soon as the body has been read."""
        self._watched = True
        if not self._body_left:
            self._watcher = asyncio.ensure_future(self._drain())

    def leave(self) -> None:
        """The work has ended."""
        self._watched = False
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _drain(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
