"""Bodies of requests of tensors (`receive`), and the memory of the engine for large inputs (`InputMemory`).

`receive` reads a body: a head (JSON, or nothing) and raw bytes after it.

1. A small body, and one whose length is not declared, is read as any other (`frontend.http.bodies`).
2. Of a large one the raw bytes go from the connection straight into one block of the engine, where the worker reads
   them: no other copy is made. Behind them is room for the elements that the head may hold, so that nobody waits
   for more. The limits of one body and of all bodies, deadlines and disconnects are those of `frontend.http.bodies`.

`InputMemory` says who may have a block, and when.

1. `InputRoom.reserve` waits for room, in the order of arrival, and wakes when a block is given back. No request waits
   while it holds a block (`program_calls.Upload`), so a waiting request gets room once those before it are done.
2. A body that arrives slowly keeps nobody waiting: `Arriving.move_out` frees the block.
3. Requests of a sequence take turns (`UploadOrder`), in the order in which they came.

    async with receive(memory, req, head_nbytes, scope.deadline_ns) as body:
        ... parse body.head, slice body.data
        request.block = body.block
        result = await run(...)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from falcon.asgi import Request

from frontend.engine.interface import Block, Blocks
from frontend.http.bodies import BodyReader, HeldBody, Places
from frontend.scope import current_scope
from ipc import deadline
from ipc.errors import DeadlineExceeded, QueueFull, ShmExhausted
from ipc.memory import copies
from ipc.settings import Settings

HEAD_GROWTH = 4
"""An element takes at most so many times the bytes that it has in JSON, with its comma: `1,` may be eight bytes."""
MIN_BESIDE = 1 << 20
"""Bytes for what the head holds; more than this is not asked for beyond as much again as the raw bytes take."""
BEFORE_DEADLINE_NS = 50_000_000
"""An answer that there was no room leaves this long before the deadline."""
REQUESTS_OF_PIXELS = 4
"""Pixels that are decoded at a time: of so many requests as large as a request may be."""


@dataclass(slots=True, frozen=True)
class Body:
    """A body: its first bytes, and `data`, the bytes behind. `block` is the memory of `data`, None for private memory.

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
        self._arriving: Arriving | None = None

    async def __aenter__(self) -> Body:
        """The body, once the last byte has arrived."""
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
        """A block for the raw bytes; with room for what the head may hold, if such a block is free without waiting."""
        room, beside = self._memory.room, min(HEAD_GROWTH * self._head_nbytes, max(raw_nbytes, MIN_BESIDE))
        block = await room.take(raw_nbytes + beside)
        return block or await room.reserve(raw_nbytes, self._deadline_ns)

    async def _into(self, block: Block) -> Body:
        arriving, room = Arriving(self._head_nbytes, block), self._memory.room
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


class Arriving:
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
        """The body, which has arrived."""
        if self._block is None:
            return Body(bytes(self._head), memoryview(self._private), None)
        data = self._block.buffer[: self._filled_nbytes]
        return Body(bytes(self._head), data, self._block)


class Turns:
    """The line of one sequence."""

    def __init__(self) -> None:
        self.line: deque[asyncio.Event] = deque()

    @asynccontextmanager
    async def take(self, before_waiting: Callable[[], Awaitable[None]], until_ns: int) -> AsyncIterator[None]:
        """The caller's turn: turns come in the order in which they are asked for. Who has to wait does so after
        `before_waiting`.

        Raises `DeadlineExceeded` when the turn did not come in time.
        """
        own = asyncio.Event()
        self.line.append(own)
        try:
            if self.line[0] is not own:
                await before_waiting()
                await _wait(own, until_ns)
            yield
        finally:
            self.line.remove(own)
            if self.line:
                self.line[0].set()


async def _wait(turn: asyncio.Event, until_ns: int) -> None:
    try:
        async with asyncio.timeout(deadline.remaining_s(until_ns)):
            await turn.wait()
    except TimeoutError:
        raise DeadlineExceeded("requests of the same sequence that came before took too long") from None


class UploadOrder:
    """Keeps requests of one sequence in the order in which they came, however long the upload of each takes."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[tuple[str, int | str], Turns] = WeakValueDictionary()

    def of(self, model: str, sequence: int | str) -> Turns:
        """The line for uploads."""
        return self._turns.setdefault((model, sequence), Turns())


class InputMemory:
    """Where inputs of requests may be put, and how much of them.

    Payloads up to `inline_nbytes` travel in a message, larger ones in blocks of `room`. `bodies` counts what is kept in
    private memory.
    """

    def __init__(self, inputs: Blocks, bodies: BodyReader, settings: Settings) -> None:
        limits = settings.limits
        self._arena = inputs
        self.room = InputRoom(inputs, settings.arena.lease_copy_after_s)
        self.bodies, self.inline_nbytes = bodies, settings.arena.input_inline_bytes
        self.pixels = Places(REQUESTS_OF_PIXELS * limits.max_image_pixels * limits.max_images)

    @property
    def used_nbytes(self) -> int:
        """Bytes of the engine's memory that hold inputs of requests now."""
        return self._arena.used_nbytes

    @contextmanager
    def decoding(self, pixels: int) -> Iterator[None]:
        """Count pixels that are being decoded for the current request. Raises `QueueFull` when there are too many."""
        asking = current_scope.get()
        caller = "" if asking is None else asking.caller
        if not self.pixels.take(caller, pixels):
            raise QueueFull("too many pixels of images are being decoded here", retry_after_s=1)
        try:
            yield
        finally:
            self.pixels.give(caller, pixels)


class InputRoom:
    """Blocks of the engine for requests that wait in line, so that small inputs do not pass large ones."""

    def __init__(self, inputs: Blocks, patience_s: float) -> None:
        """A body that still arrives `patience_s` after it began gives its block to others who need room."""
        self._inputs, self._patience_s = inputs, patience_s
        self._line: deque[asyncio.Event] = deque()
        self.arriving: set[Arriving] = set()
        inputs.on_room = self._wake_first

    async def take(self, nbytes: int) -> Block | None:
        """A block of that size, if there is room now that nobody waits for."""
        return None if self._line else await self._inputs.reserve(nbytes)

    async def reserve(self, nbytes: int, deadline_ns: int) -> Block | None:
        """A block of that size, as soon as there is room; None when it never fits.

        Raises `ShmExhausted` when there was no room until shortly before the deadline.
        """
        if not self._line:
            block = await self._inputs.reserve(nbytes)
            if block is not None or nbytes > self._inputs.capacity_nbytes:
                return block
        turn = asyncio.Event()
        self._line.append(turn)
        try:
            return await self._wait(turn, nbytes, deadline_ns)
        finally:
            self._line.remove(turn)
            self._wake_first()

    async def _wait(self, turn: asyncio.Event, nbytes: int, deadline_ns: int) -> Block | None:
        while nbytes <= self._inputs.capacity_nbytes:
            if turn is self._line[0]:
                turn.clear()
                block = await self._inputs.reserve(nbytes)
                if block is not None:
                    return block
                if self._move_out_slow():
                    continue
            left_s = deadline.remaining_s(deadline_ns - BEFORE_DEADLINE_NS)
            if left_s <= 0:
                raise ShmExhausted(
                    f"no room for {nbytes} bytes of inputs in shared memory (arena.input_bytes)",
                    retry_after_s=1,
                )
            # NOTE: only who is first in line looks for slow bodies, so only the first needs to wake for them.
            patience_s = self._until_slow_s() if turn is self._line[0] else left_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, patience_s)):
                    await turn.wait()
        return None

    def _wake_first(self) -> None:
        if self._line:
            self._line[0].set()

    def _until_slow_s(self) -> float:
        """Seconds until a body that arrives, or that begins to arrive now, has done so for too long."""
        began = min((body.began for body in self.arriving), default=time.monotonic())
        return max(0.0, began + self._patience_s - time.monotonic())

    def _move_out_slow(self) -> bool:
        """Move the body out that has been arriving for longest, if that is too long; whether there was one."""
        oldest = min(self.arriving, key=lambda body: body.began, default=None)
        if oldest is None or time.monotonic() - oldest.began < self._patience_s:
            return False
        # NOTE: remove the body first, or the caller's loop would pick it forever.
        self.arriving.discard(oldest)
        oldest.move_out()
        return True
