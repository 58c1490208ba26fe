"""Request bodies: counted as they arrive and until the request ends; a body that is cut short is not decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from falcon import testing
from falcon.asgi import Request

from frontend.http.bodies import SMALL_NBYTES, BodyReader, note_disconnect, noting
from ipc import deadline
from ipc.errors import BodyTooLarge, Cancelled, DeadlineExceeded, QueueFull
from ipc.settings import Limits

PART = b"x" * SMALL_NBYTES
DISCONNECT = {"type": "http.disconnect"}


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run a test on a loop of its own."""
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    """A piece of a body as an event."""
    return {"type": "http.request", "body": body, "more_body": more}


class Upload:
    """A request whose events a test sends one by one."""

    def __init__(self, first: dict[str, Any], length: int | None, noted: bool = False) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        headers = {} if length is None else {"Content-Length": str(length)}
        scope = testing.create_scope(method="POST", headers=headers)
        receive = noting(scope, self.events.get) if noted else self.events.get
        self.request = Request(scope, receive, first_event=first)  # type: ignore[arg-type]

    def send(self, event: dict[str, Any]) -> None:
        """The next event."""
        self.events.put_nowait(event)


def reader(room_nbytes: int = 1 << 20, largest_nbytes: int = 1 << 20) -> BodyReader:
    """A reader with room for `room_nbytes`."""
    return BodyReader(Limits(max_buffered_bytes=room_nbytes, max_body_bytes=largest_nbytes))


async def held(bodies: BodyReader, upload: Upload, timeout_s: float = 60) -> bytes:
    """The body, read and given back."""
    async with bodies.receive(upload.request, deadline.after(timeout_s)) as body:
        return body


def test_a_body_counts_until_its_request_ends() -> None:
    async def test() -> None:
        bodies = reader()
        whole, slow = Upload(part(b"abc", False), 3), Upload(part(PART), 2 * len(PART))
        async with bodies.receive(whole.request, deadline.after(60)) as body:
            assert (body, bodies.held_nbytes) == (b"abc", 3)
            slow.send(part(PART, False))
            async with bodies.receive(slow.request, deadline.after(60)) as other:
                assert other == PART * 2
                assert bodies.held_nbytes == 3 + 2 * len(PART)
        assert bodies.held_nbytes == 0

    run(test)


def test_declared_bytes_that_do_not_arrive_take_no_room() -> None:
    async def test() -> None:
        bodies = reader(room_nbytes=3 * len(PART))
        waiting = [
            asyncio.ensure_future(held(bodies, Upload(part(b"a"), bodies.limits.max_body_bytes)))
            for _ in range(8)
        ]
        await asyncio.sleep(0)
        assert bodies.held_nbytes == 8
        upload = Upload(part(PART), 2 * len(PART))
        upload.send(part(PART, False))
        assert await held(bodies, upload) == PART * 2
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert bodies.held_nbytes == 0

    run(test)


@pytest.mark.parametrize("length", [4 * len(PART), None])
def test_a_body_is_refused_when_its_bytes_find_no_room(length: int | None) -> None:
    async def test() -> None:
        bodies = reader(room_nbytes=3 * len(PART))
        upload = Upload(part(PART), length)
        for _ in range(3):
            upload.send(part(PART))
        with pytest.raises(QueueFull):
            await held(bodies, upload)
        assert bodies.held_nbytes == 0

    run(test)


def test_a_small_body_is_served_when_large_ones_fill_the_room() -> None:
    async def test() -> None:
        bodies = reader(room_nbytes=len(PART))
        async with bodies.receive(Upload(part(PART, False), len(PART)).request, deadline.after(60)):
            assert await held(bodies, Upload(part(b"small", False), 5)) == b"small"

    run(test)


@pytest.mark.parametrize("length", [100, 1_000_000, None])
def test_a_body_that_stalls_ends_with_the_deadline(length: int | None) -> None:
    async def test() -> None:
        bodies = reader()
        with pytest.raises(DeadlineExceeded):
            await held(bodies, Upload(part(b"{"), length), timeout_s=0.02)
        assert bodies.held_nbytes == 0

    run(test)


@pytest.mark.parametrize("length", [100, 1_000_000, None])
def test_a_body_cut_short_by_its_client_is_no_bad_request(length: int | None) -> None:
    async def test() -> None:
        bodies = reader()
        upload = Upload(part(b"{"), length, noted=True)
        upload.send(DISCONNECT)
        with pytest.raises(Cancelled):
            await held(bodies, upload)
        assert bodies.held_nbytes == 0

    run(test)


def test_a_chunked_body_cut_short_under_our_own_server_is_no_bad_request() -> None:
    async def test() -> None:
        upload = Upload(part(b'{"items": []}'), None)
        note_disconnect(upload.request.scope)
        upload.send(DISCONNECT)
        with pytest.raises(Cancelled):
            await held(reader(), upload)

    run(test)


@pytest.mark.parametrize("length", [101, None])
def test_a_body_over_the_limit_is_refused(length: int | None) -> None:
    async def test() -> None:
        bodies = reader(largest_nbytes=100)
        with pytest.raises(BodyTooLarge):
            await held(bodies, Upload(part(b"x" * 101, False), length))
        assert bodies.held_nbytes == 0

    run(test)


@pytest.mark.parametrize("length", [101, None])
def test_a_route_may_have_a_lower_limit_at_which_reading_ends(length: int | None) -> None:
    """Without a declared length what follows the limit is never read."""

    async def test() -> None:
        bodies, upload = reader(largest_nbytes=10_000), Upload(part(b"x" * 101), length)
        with pytest.raises(BodyTooLarge, match=r"100$|100 bytes$"):
            async with bodies.receive(upload.request, deadline.after(60), 100):
                pass
        assert bodies.held_nbytes == 0

    run(test)


@pytest.mark.parametrize("length", [0, None])
def test_no_body_is_an_empty_one(length: int | None) -> None:
    run(lambda: _assert_empty(length))


async def _assert_empty(length: int | None) -> None:
    assert await held(reader(), Upload(part(b"", False), length)) == b""
