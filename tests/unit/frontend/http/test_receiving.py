"""Bodies of tensor requests: large ones go straight into the input arena, and give way to others when they are slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from falcon import testing
from falcon.asgi import Request

from frontend.http.bodies import note_disconnect, noting, until_disconnect
from frontend.services import Services
from frontend.tensors.uploading import Body, receive
from ipc import deadline
from ipc.errors import BodyTooLarge, Cancelled, DeadlineExceeded, PenstockError, ShmExhausted
from ipc.memory import copies
from tests.fakes.tensors import services_of

MIB = 1 << 20
HEAD = b'{"inputs": []}'
DATA = bytes(range(256)) * 8192


def services(root: Path, **settings: str) -> Services:
    """Services with an input arena of 4 MiB."""
    return services_of(root, [], [], **{"arena__input_bytes": str(4 * MIB), **settings})


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    """A piece of a body as an event."""
    return {"type": "http.request", "body": body, "more_body": more}


class Upload:
    """A request whose body a test sends in pieces."""

    def __init__(self, length: int | None, *pieces: bytes, whole: bool = True) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        headers = {} if length is None else {"Content-Length": str(length)}
        scope = testing.create_scope(method="POST", headers=headers)
        last = len(pieces) - 1
        events = [part(piece, not whole or at < last) for at, piece in enumerate(pieces)]
        for event in events[1:]:
            self.events.put_nowait(event)
        receiver = noting(scope, self.events.get)
        self.request = Request(scope, receiver, first_event=events[0])  # type: ignore[arg-type]

    def send(self, piece: bytes, more: bool = False) -> None:
        """The next piece."""
        self.events.put_nowait(part(piece, more))


def pieces_of(body: bytes, nbytes: int) -> list[bytes]:
    """The body, cut."""
    return [body[at : at + nbytes] for at in range(0, len(body), nbytes)]


def on_loop(made: Services, work: Coroutine[Any, Any, None]) -> None:
    """Run on a loop of its own; all bytes and blocks must have been given back."""

    async def test() -> None:
        try:
            await asyncio.wait_for(work, 60)
            assert made.bodies.held_nbytes == 0
            made.engine.client.inputs.verify()
            assert made.engine.client.inputs.used_nbytes == 0
            assert not made.tensor_inference.inputs.room.arriving
        finally:
            made.engine.client.inputs.close()

    asyncio.run(test())


def open_(made: Services, upload: Upload, head_nbytes: int, timeout_s: float = 60) -> Any:
    """The context of a body."""
    return receive(made.tensor_inference.inputs, upload.request, head_nbytes, deadline.after(timeout_s))


@pytest.mark.sample(2)
@pytest.mark.parametrize("cut", [7, len(HEAD), len(HEAD) + 1, 100_000, 1 << 22])
def test_a_large_body_is_received_into_one_block(cut: int, tmp_path: Path) -> None:
    made, body = services(tmp_path), HEAD + DATA[: 70_000 if cut == 7 else None]

    async def test() -> None:
        before = copies.copied()["receive"]
        upload = Upload(len(body), *pieces_of(body, cut))
        async with open_(made, upload, len(HEAD)) as found:
            assert found.block is not None
            assert (found.head, bytes(found.data)) == (HEAD, body[len(HEAD) :])
            assert made.bodies.held_nbytes == len(body)
            assert made.engine.client.inputs.used_nbytes >= len(body) - len(HEAD)
        assert copies.copied()["receive"] - before == len(body) - len(HEAD), "every byte is copied once"

    on_loop(made, test())


def test_behind_a_body_is_room_for_what_its_head_holds_unless_that_never_fits(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        for head, room in ((b" " * 1000, 4000), (b" " * MIB, 0)):
            body = head + DATA
            async with open_(made, Upload(len(body), body), len(head)) as found:
                assert found.block is not None and bytes(found.data) == DATA
                assert len(found.block.buffer) == len(DATA) + room

    on_loop(made, test())


def test_nobody_waits_for_room_that_is_only_for_the_head(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        other = await made.tensor_inference.inputs.room.reserve(MIB, deadline.after(60))
        assert other is not None
        with other:
            body = b" " * MIB + DATA
            async with open_(made, Upload(len(body), body), MIB) as found:
                assert found.block is not None and len(found.block.buffer) == len(DATA)

    on_loop(made, test())


@pytest.mark.parametrize(
    ("length", "body", "head_nbytes", "head", "data"),
    [
        (len(HEAD) + 5, HEAD + b"12345", len(HEAD), HEAD, b"12345"),
        (5, b"12345", 0, b"", b"12345"),
        (5, b"12345", 5, b"12345", b""),
        (5, b"12345", 1 << 40, b"12345", b""),
        (0, b"", 0, b"", b""),
        (None, HEAD + DATA, len(HEAD), HEAD, DATA),
        (len(DATA), DATA, len(DATA) - 1, DATA[:-1], DATA[-1:]),
    ],
)
def test_other_bodies_are_private(
    length: int | None, body: bytes, head_nbytes: int, head: bytes, data: bytes, tmp_path: Path
) -> None:
    made = services(tmp_path)

    async def test() -> None:
        async with open_(made, Upload(length, body), head_nbytes) as found:
            assert (found.head, bytes(found.data), found.block) == (head, data, None)

    on_loop(made, test())


def test_without_an_arena_large_bodies_are_private_too(tmp_path: Path) -> None:
    made = services(tmp_path, arena__input_bytes="0")

    async def test() -> None:
        async with open_(made, Upload(len(DATA), DATA), 0) as found:
            assert (bytes(found.data), found.block) == (DATA, None)

    on_loop(made, test())


def test_a_body_over_the_limit_takes_no_block(tmp_path: Path) -> None:
    made = services(tmp_path, limits__max_body_bytes=str(MIB))

    async def test() -> None:
        with pytest.raises(BodyTooLarge):
            async with open_(made, Upload(MIB + 1, b"x", whole=False), 0):
                pass

    on_loop(made, test())


async def _fails(made: Services, upload: Upload, error: type[PenstockError], timeout_s: float = 60) -> None:
    with pytest.raises(error):
        async with open_(made, upload, 0, timeout_s):
            pass


def test_a_body_that_stalls_or_is_cut_short_gives_its_block_back(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        await _fails(made, Upload(MIB, b"begun", whole=False), DeadlineExceeded, timeout_s=0.05)
        cut = Upload(MIB, b"begun", whole=False)
        cut.events.put_nowait({"type": "http.disconnect"})
        await _fails(made, cut, Cancelled)

    on_loop(made, test())


async def _until_arriving(made: Services, count: int) -> None:
    """Until that many bodies have a block."""
    async with asyncio.timeout(60):
        while len(made.tensor_inference.inputs.room.arriving) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def _whole(made: Services, upload: Upload, timeout_s: float = 60) -> Body:
    async with open_(made, upload, len(HEAD), timeout_s) as found:
        return Body(found.head, memoryview(bytes(found.data)), found.block)


def test_a_slow_body_goes_on_in_private_memory_when_others_need_room(tmp_path: Path) -> None:
    made, body = services(tmp_path, arena__lease_copy_after_s="0"), HEAD + DATA

    async def test() -> None:
        slow = Upload(len(body), body[:5000], whole=False)
        begun = asyncio.ensure_future(_whole(made, slow))
        await _until_arriving(made, 1)
        other = HEAD + DATA[::-1] + DATA[: MIB // 2]
        found = await _whole(made, Upload(len(other), other))
        assert found.block is not None
        assert bytes(found.data) == other[len(HEAD) :]
        slow.send(body[5000:])
        moved = await begun
        assert (moved.head, bytes(moved.data), moved.block) == (HEAD, DATA, None)

    on_loop(made, test())


def test_a_body_in_good_time_keeps_its_block_and_others_wait(tmp_path: Path) -> None:
    made, body = services(tmp_path, arena__lease_copy_after_s="60"), HEAD + DATA * 2

    async def test() -> None:
        first = Upload(len(body) - len(DATA), body[:5000], whole=False)
        begun = asyncio.ensure_future(_whole(made, first))
        await _until_arriving(made, 1)
        began = time.monotonic()
        with pytest.raises(ShmExhausted):
            await _whole(made, Upload(3 * MIB, b"x", whole=False), timeout_s=0.2)
        assert time.monotonic() - began < 30
        second = asyncio.ensure_future(_whole(made, Upload(3 * MIB, HEAD + bytes(3 * MIB - len(HEAD)))))
        first.send(body[5000 : len(body) - len(DATA)])
        assert (await begun).block is not None
        assert (await second).block is not None

    on_loop(made, test())


def test_a_client_that_goes_away_waits_for_room_no_more(tmp_path: Path) -> None:
    made = services(tmp_path)

    async def test() -> None:
        block = await made.engine.client.inputs.reserve(3 * MIB)
        assert block is not None
        upload = Upload(2 * MIB, b"x", whole=False)
        waiting = asyncio.ensure_future(until_disconnect(_whole(made, upload), upload.request.scope))
        await asyncio.sleep(0)
        note_disconnect(upload.request.scope)
        with pytest.raises(Cancelled):
            await waiting
        block.release()

    on_loop(made, test())
