"""Receives the body of a request of tensors: a head (JSON, or nothing) and raw bytes after it.

1. A small body, and one whose length is not declared, is read as any other (`frontend.http.bodies`).
2. Of a large one the raw bytes go from the connection straight into one block of the engine, where the worker reads
   them: no other copy is made. Behind them is room for the elements that the head may hold, so that nobody waits
   for more. The limits of one body and of all bodies, deadlines and disconnects are those of `frontend.http.bodies`.

    async with receive(memory, req, head_nbytes, scope.deadline_ns) as body:
        ... parse body.head, slice body.data
        request.block = body.block
        result = await run(...)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from falcon.asgi import Request

from frontend.engine.interface import Block
from frontend.http.bodies import HeldBody
from frontend.tensors.uploading import InputMemory
from ipc.memory import copies

HEAD_GROWTH = 4
"""An element takes at most so many times the bytes that it has in JSON, with its comma: `1,` may be eight bytes."""
MIN_BESIDE = 1 << 20
"""Bytes for what the head holds; more than this is not asked for beyond as much again as the raw bytes take."""


@dataclass(slots=True, frozen=True)
class Body:
    """A body: the first bytes of it, and all that follow. `block` is where `data` lie, None when they are private.

    A block may go on behind `data`, with room for what the head holds.
    """

    head: bytes
    data: memoryview
    block: Block | None


def receive(memory: InputMemory, req: Request, head_nbytes: int, deadline_ns: int) -> Receiving:
    """The body of `req` as an asynchronous context; leaving it ends its share of all budgets, and its block.

    `head_nbytes` 0 means that the whole body is raw bytes. A body shorter than its head is all head.

    Raises as `BodyReader.receive`, and `ShmExhausted` when the arena had no room until shortly before the deadline.
    """
    return Receiving(memory, req, head_nbytes, deadline_ns)


class Receiving:
    """One body on its way."""

    __slots__ = ("_arriving", "_deadline_ns", "_head_nbytes", "_held", "_memory", "_req")

    def __init__(self, memory: InputMemory, req: Request, head_nbytes: int, deadline_ns: int) -> None:
        self._memory, self._req = memory, req
        self._head_nbytes, self._deadline_ns = head_nbytes, deadline_ns
        self._held: HeldBody | None = None
        self._arriving: _Arriving | None = None

    async def __aenter__(self) -> Body:
        """The body, once all of it has arrived."""
        memory = self._memory
        raw_nbytes = (self._req.content_length or 0) - self._head_nbytes
        too_large = raw_nbytes > memory.bodies.limits.max_body_bytes
        if raw_nbytes > memory.inline_nbytes and not too_large:
            block = await self._reserve(raw_nbytes)
            if block is not None:
                return await self._into(block)
        held = memory.bodies.receive(self._req, self._deadline_ns)
        body = await held.__aenter__()
        self._held = held
        return Body(body[: self._head_nbytes], memoryview(body)[self._head_nbytes :], None)

    async def _reserve(self, raw_nbytes: int) -> Block | None:
        """A block for the raw bytes, and for what the head may hold where there is room for it without waiting."""
        room, beside = self._memory.room, min(HEAD_GROWTH * self._head_nbytes, max(raw_nbytes, MIN_BESIDE))
        block = await room.take(raw_nbytes + beside)
        return block or await room.reserve(raw_nbytes, self._deadline_ns)

    async def _into(self, block: Block) -> Body:
        arriving, room = _Arriving(self._head_nbytes, block), self._memory.room
        room.arriving.add(arriving)
        try:
            poured = self._memory.bodies.pour(self._req, self._deadline_ns, arriving.take)
            await poured.__aenter__()
        except BaseException:
            arriving.release()
            raise
        finally:
            room.arriving.discard(arriving)
        self._arriving, self._held = arriving, poured
        return arriving.body()

    async def __aexit__(self, *_: object) -> None:
        if self._arriving is not None:
            self._arriving.release()
        if self._held is not None:
            await self._held.__aexit__()


class _Arriving:
    """What has come of a body whose raw bytes go into a block."""

    def __init__(self, head_nbytes: int, block: Block) -> None:
        self.began = time.monotonic()
        self._head, self._head_nbytes = bytearray(), head_nbytes
        self._block: Block | None = block
        self._filled_nbytes = 0
        self._private = bytearray()

    def take(self, part: bytes) -> None:
        """The next piece."""
        missing = self._head_nbytes - len(self._head)
        piece = memoryview(part)
        if missing > 0:
            self._head += piece[:missing]
            piece = piece[missing:]
        if self._block is None:
            self._private += piece
            return
        copies.count("receive", len(piece))
        self._block.buffer[self._filled_nbytes : self._filled_nbytes + len(piece)] = piece
        self._filled_nbytes += len(piece)

    def move_out(self) -> None:
        """Go on in private memory and give the block back."""
        if self._block is not None:
            self._private += self._block.buffer[: self._filled_nbytes]
            self.release()

    def release(self) -> None:
        """Give the block back."""
        if self._block is not None:
            block, self._block = self._block, None
            block.release()

    def body(self) -> Body:
        """All of it, once it has arrived."""
        if self._block is None:
            return Body(bytes(self._head), memoryview(self._private), None)
        data = self._block.buffer[: self._filled_nbytes]
        return Body(bytes(self._head), data, self._block)
