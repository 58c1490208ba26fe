"""Work ends when its client goes away: before it began, while it runs, under our own server and under another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from frontend.http.bodies import CALLBACK_KEY, note_disconnect, noting, until_disconnect
from ipc.errors import Cancelled

DISCONNECT = {"type": "http.disconnect"}


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run a test on a loop of its own."""
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Work that takes until it is told to end; it notes how it went."""

    def __init__(self) -> None:
        self.begun, self.end = asyncio.Event(), asyncio.Event()
        self.cancelled = False

    async def run(self) -> str:
        """The work."""
        self.begun.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "done"


def test_the_result_is_given_while_the_client_stays() -> None:
    async def test() -> None:
        scope: dict[str, Any] = {CALLBACK_KEY: None}
        work = Work()
        work.end.set()
        assert await until_disconnect(work.run(), scope) == "done"
        assert scope == {CALLBACK_KEY: None}

    run(test)


def test_a_disconnect_cancels_the_work() -> None:
    async def test() -> None:
        scope: dict[str, Any] = {CALLBACK_KEY: None}
        work = Work()
        task = asyncio.ensure_future(until_disconnect(work.run(), scope))
        await work.begun.wait()
        note_disconnect(scope)
        with pytest.raises(Cancelled):
            await task
        assert work.cancelled and task.cancelling() == 0

    run(test)


def test_a_client_that_left_before_costs_no_work() -> None:
    async def test() -> None:
        scope: dict[str, Any] = {CALLBACK_KEY: None}
        note_disconnect(scope)
        note_disconnect(scope)
        work = Work()
        with pytest.raises(Cancelled):
            await until_disconnect(work.run(), scope)
        assert not work.begun.is_set()

    run(test)


def test_under_another_server_the_disconnect_is_noticed_once_the_body_has_been_read() -> None:
    async def test() -> None:
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope: dict[str, Any] = {}
        receive = noting(scope, events.get)
        first, second = ({"type": "http.request", "body": b"x", "more_body": more} for more in (True, False))
        events.put_nowait(first)
        assert await receive() is first
        read = asyncio.Event()

        async def work() -> None:
            await settle()
            assert len(asyncio.all_tasks() - before) == 1, "nobody reads events beside the reader of the body"
            assert await receive() is second
            read.set()
            await asyncio.Event().wait()

        before = asyncio.all_tasks()
        task = asyncio.ensure_future(until_disconnect(work(), scope))
        await settle()
        events.put_nowait(second)
        await read.wait()
        events.put_nowait(DISCONNECT)
        with pytest.raises(Cancelled):
            await task
        await settle()
        assert asyncio.all_tasks() == before

    run(test)


def test_a_cancelled_task_is_not_taken_for_a_client_that_left() -> None:
    async def test() -> None:
        work = Work()
        task = asyncio.ensure_future(until_disconnect(work.run(), {CALLBACK_KEY: None}))
        await work.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(test)


def test_under_another_server_the_disconnect_event_cancels_the_work() -> None:
    async def test() -> None:
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope: dict[str, Any] = {}
        noting(scope, events.get)
        work = Work()
        task = asyncio.ensure_future(until_disconnect(work.run(), scope))
        await work.begun.wait()
        events.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await settle()
        assert not task.done(), "the empty end of the body is no disconnect"
        events.put_nowait(DISCONNECT)
        with pytest.raises(Cancelled):
            await task
        assert work.cancelled

    run(test)


def test_under_another_server_nothing_waits_after_the_result() -> None:
    async def test() -> None:
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope: dict[str, Any] = {}
        noting(scope, events.get)
        work, before = Work(), asyncio.all_tasks()
        task = asyncio.ensure_future(until_disconnect(work.run(), scope))
        await work.begun.wait()
        assert len(asyncio.all_tasks() - before) == 2, "the work and the watch for the disconnect"
        work.end.set()
        assert await task == "done"
        await settle()
        assert asyncio.all_tasks() == before

    run(test)
