"""Ends work when its client goes away.

The request's scope says how things stand under `CALLBACK_KEY`: None while nobody asks, a function to call at the
disconnect while work runs, `GONE` from the disconnect on. Penstock's own server sets it from the connection, which
costs nothing while the client stays. For another ASGI server `noting` sets it when the disconnect event is received,
and a second task waits for that event while work runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from ipc.errors import Cancelled

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

CALLBACK_KEY = "penstock.disconnected"
RECEIVE_KEY = "penstock.receive"
GONE = object()


def note_disconnect(scope: Any) -> None:
    """The client of `scope` has gone: remember it and end the work that waits for it."""
    callback = scope.get(CALLBACK_KEY)
    scope[CALLBACK_KEY] = GONE
    if callback is not None and callback is not GONE:
        callback()


def is_gone(scope: Any) -> bool:
    """Whether the client of `scope` is known to have gone."""
    return scope.get(CALLBACK_KEY) is GONE


def noting(scope: Any, receive: Receive) -> Receive:
    """`receive` of a server that does not call back, made to note the disconnect in `scope`."""

    async def receive_and_note() -> MutableMapping[str, Any]:
        event = await receive()
        if event["type"] == "http.disconnect":
            note_disconnect(scope)
        return event

    scope[CALLBACK_KEY], scope[RECEIVE_KEY] = None, receive_and_note
    return receive_and_note


async def until_disconnect(
    work: Coroutine[Any, Any, T], scope: dict[str, Any], *, body_read: bool = True
) -> T:
    """The result of `work`. Raises `Cancelled` when the client of `scope` went away first; `work` is cancelled then.

    Inside another `until_disconnect` of the same request `work` is simply awaited: the outer one ends it. While the
    body is still to be read (`body_read` false), a server that does not call back is not asked for its next event.
    """
    if is_gone(scope):
        work.close()
        raise Cancelled("the client went away")
    if scope.get(CALLBACK_KEY) is not None:
        return await work
    watches = body_read and RECEIVE_KEY in scope
    watcher = asyncio.ensure_future(_drain(scope[RECEIVE_KEY])) if watches else None
    try:
        return await _with_callback(work, scope)
    finally:
        if watcher is not None:
            watcher.cancel()


async def _with_callback(work: Coroutine[Any, Any, T], scope: dict[str, Any]) -> T:
    task = asyncio.current_task()

    def leave() -> None:
        if task is not None:
            task.cancel()

    scope[CALLBACK_KEY] = leave
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone(scope):
            raise
        if task is not None:
            task.uncancel()
        raise Cancelled("the client went away") from None
    finally:
        if scope[CALLBACK_KEY] is leave:
            scope[CALLBACK_KEY] = None


async def _drain(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
