"""Puts the inputs of a request where a worker reads them: into the message, or into a block of the input arena.

1. Inputs that were received into a block stay in it (`places_in`); `laid_out` gives others a place in a payload.
2. Small payloads are joined and travel in the message; large ones are copied once, into a block.
3. `InputRoom.reserve` waits for room. A body that arrives slowly does not keep others waiting: what has come of it is
   moved out of the arena (`Arriving.move_out`).
"""

from __future__ import annotations

import asyncio
import time
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
LOOK_EVERY_S = 0.005
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
    """Blocks of the input arena, for whoever may wait for one."""

    def __init__(self, inputs: InputArena, patience_s: float) -> None:
        """A body that still arrives `patience_s` after it began gives its block to others who need room."""
        self._inputs, self._patience_s = inputs, patience_s
        self.arriving: set[Arriving] = set()

    async def reserve(self, nbytes: int, deadline_ns: int) -> InputBlock | None:
        """A block of that size, as soon as there is room; None when it never fits.

        Raises `ShmExhausted` when there was no room until shortly before the deadline.
        """
        while nbytes <= self._inputs.capacity_nbytes:
            block = await self._inputs.reserve(nbytes)
            if block is not None:
                return block
            if nbytes > self._inputs.capacity_nbytes:
                break
            if self._move_out_slow():
                continue
            if time.monotonic_ns() > deadline_ns - BEFORE_DEADLINE_NS:
                raise ShmExhausted(
                    f"no room for {nbytes} bytes of inputs in shared memory (arena.input_bytes)",
                    retry_after_s=1,
                )
            await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, deadline.remaining_s(deadline_ns))))
        return None

    def _move_out_slow(self) -> bool:
        """Move the body out that has been arriving for longest, if that is too long; whether there was one."""
        oldest = min(self.arriving, key=lambda body: body.began, default=None)
        if oldest is None or time.monotonic() - oldest.began < self._patience_s:
            return False
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
