"""Puts the inputs of a request where a worker reads them: into the message, or into a block of the input arena.

1. Inputs that were received into a block stay in it (`places_in`); `laid_out` gives others a place in a payload.
2. Small payloads are joined and travel in the message; large ones are copied once, into a block.
3. `InputRoom.reserve` waits for room, in the order of arrival, and wakes when a block is given back. A body that
   arrives slowly keeps nobody waiting: what has come of it is moved out of the arena (`Arriving.move_out`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from frontend.tensors.request import InputTensor
from ipc import copies, deadline
from ipc.errors import ShmExhausted
from ipc.input_arena import InputArena, InputBlock

ALIGNMENT = 8
"""Inputs of a payload start at multiples of this many bytes."""
BEFORE_DEADLINE_NS = 50_000_000
"""An answer that there was no room leaves this long before the deadline."""
SLICE_NBYTES = 1 << 20
"""Bytes that are copied before others on this event loop have their turn."""


class Arriving(Protocol):
    """A body that is being received into a block."""

    began: float

    def move_out(self) -> None:
        """Go on in private memory and give the block back."""


class UploadOrder:
    """Keeps requests of one sequence in the order in which they came, however long the upload of each takes."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[str, int | str], asyncio.Lock] = WeakValueDictionary()

    def of(self, model: str, sequence: int | str) -> asyncio.Lock:
        """To be held during the upload; those who wait for it get it in their order."""
        return self._locks.setdefault((model, sequence), asyncio.Lock())


class InputRoom:
    """Blocks of the input arena, for whoever may wait for one: in line, so that small inputs do not pass large ones."""

    def __init__(self, inputs: InputArena, patience_s: float) -> None:
        """A body that still arrives `patience_s` after it began gives its block to others who need room."""
        self._inputs, self._patience_s = inputs, patience_s
        self._line: deque[asyncio.Event] = deque()
        self.arriving: set[Arriving] = set()
        inputs.on_room = self._wake_first

    async def reserve(self, nbytes: int, deadline_ns: int) -> InputBlock | None:
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

    async def _wait(self, turn: asyncio.Event, nbytes: int, deadline_ns: int) -> InputBlock | None:
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


def places_in(block: InputBlock, inputs: Sequence[InputTensor]) -> list[int] | None:
    """Where each input starts in a block; None unless all of them lie in it."""
    places = [place for tensor in inputs if (place := _place_in(block, tensor)) is not None]
    return places if len(places) == len(inputs) else None


def laid_out(inputs: Sequence[InputTensor]) -> tuple[list[int], int]:
    """Where each input starts in a payload made of all of them, and the payload's bytes."""
    starts, at = [], 0
    for tensor in inputs:
        starts.append(at)
        if tensor.data is not None:
            at += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
    return starts, at


def _place_in(block: InputBlock, tensor: InputTensor) -> int | None:
    """First byte of an input within the block; None when it lies elsewhere."""
    if not tensor.data:
        return 0
    place = _address(tensor.data) - _address(block.buffer)
    return place if 0 <= place <= len(block.buffer) - len(tensor.data) else None


def _address(data: bytes | memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def joined(inputs: Sequence[InputTensor]) -> bytes | memoryview:
    """The payload as bytes, laid out as `laid_out` says."""
    if len(inputs) == 1:
        return inputs[0].data or b""
    parts: list[bytes | memoryview] = []
    for tensor in inputs:
        if tensor.data is not None:
            parts.append(tensor.data)
            if len(tensor.data) % ALIGNMENT:
                parts.append(bytes(-len(tensor.data) % ALIGNMENT))
    return b"".join(parts)


async def copy(inputs: Sequence[InputTensor], starts: Sequence[int], block: InputBlock) -> None:
    """Copy the inputs to their places in a block, slice by slice."""
    for tensor, start in zip(inputs, starts, strict=True):
        if tensor.data is None:
            continue
        data = memoryview(tensor.data)
        copies.count("receive", len(data))
        for at in range(0, len(data), SLICE_NBYTES):
            piece = data[at : at + SLICE_NBYTES]
            block.buffer[start + at : start + at + len(piece)] = piece
            if at:
                await asyncio.sleep(0)
