"""Ends work when its client goes away.

Under Penstock's own server the connection calls back (`scope["penstock.disconnected"]`), which costs nothing while the
client stays. Under another ASGI server a second task waits for the disconnect event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ipc.errors import Cancelled

T = TypeVar("T")

CALLBACK_KEY = "penstock.disconnected"


async def until_disconnect(work: Coroutine[Any, Any, T], scope: dict[str, Any]) -> T:
    """The result of `work`. Raises `Cancelled` when the client of `scope` went away first; `work` is cancelled then."""
    if CALLBACK_KEY in scope:
        return await _with_callback(work, scope)
    return await _with_receive(work, scope)


async def _with_callback(work: Coroutine[Any, Any, T], scope: dict[str, Any]) -> T:
    task = asyncio.current_task()
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        if task is not None:
            task.cancel()

    scope[CALLBACK_KEY] = leave
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        if task is not None:
            task.uncancel()
        raise Cancelled("the client went away") from None
    finally:
        scope[CALLBACK_KEY] = None


async def _with_receive(work: Coroutine[Any, Any, T], scope: dict[str, Any]) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(scope["penstock.receive"]())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client went away")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
