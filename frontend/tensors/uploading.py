"""Who may put inputs into the memory that the engine offers for large inputs, and when.

1. `InputRoom.reserve` waits for room, in the order of arrival, and wakes when a block is given back. Nobody waits who
   holds a block (`placing`), so whoever waits gets room as soon as those before him are done.
2. A body that arrives slowly keeps nobody waiting: `Arriving.move_out` frees the block.
3. Requests of a sequence take turns (`UploadOrder`), in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol
from weakref import WeakValueDictionary

from frontend.engine.interface import Block, Blocks
from frontend.http.bodies import BodyReader
from frontend.http.places import Places
from frontend.scope import current_scope
from ipc import deadline
from ipc.errors import DeadlineExceeded, QueueFull, ShmExhausted
from ipc.settings import Settings

BEFORE_DEADLINE_NS = 50_000_000
"""An answer that there was no room leaves this long before the deadline."""
REQUESTS_OF_PIXELS = 4
"""Pixels that are decoded at a time: of so many requests as large as a request may be."""


class Arriving(Protocol):
    """A body that is being received into a block."""

    began: float

    def move_out(self) -> None:
        """Go on in private memory and give the block back."""


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
    """Blocks of the engine, for whoever may wait for one: in line, so that small inputs do not pass large ones."""

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
        # NOTE: a body that is out has nothing more to give; left among them it would be found again for ever.
        self.arriving.discard(oldest)
        oldest.move_out()
        return True
