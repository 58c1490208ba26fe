"""A frontend's shared memory for large inputs: the arena of `ipc.memory.arena` with the roles exchanged.

1. `reserve` gives a block that a request's bytes are received into. The first call creates the file.
2. A request that carries the block (the payload of `Engine.run`) is a reader of the block at the request's worker. A
   reader ends when the worker answers or dies, or, for a cancelled request, when the worker sends `InputFreed`.
3. The block is free once its owner has released it and no reader is left. A retry sends the same block again.

Everything happens on the event loop; only the file is made in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from ipc.errors import ConfigError, ProtocolError
from ipc.memory.arena import BLOCKS_OFFSET, STAMP_NBYTES, Arena, ArenaView, Block, LeaseTable
from ipc.processes.paths import RunPaths
from ipc.wire.messages import BlockRef, Inputs

log = logging.getLogger(__name__)


class InputBlock:
    """Bytes of one request's inputs; use it as a context manager, or call `release` when the request has its answer."""

    def __init__(self, block: Block, buffer: memoryview, arena: InputArena) -> None:
        self.buffer = buffer
        self.ref = BlockRef(block.offset, block.nbytes, block.generation)
        self._block, self._arena = block, arena
        self._readers = 0
        self._released = False

    @property
    def inputs(self) -> Inputs:
        """The message that a worker must have before a message names the block."""
        return self._arena.inputs

    def shorten(self, nbytes: int) -> None:
        """The payload is the first `nbytes` of the block; the bytes behind are unused."""
        self.buffer = self.buffer[:nbytes]

    def release(self) -> None:
        """The owner needs the block no more: `buffer` must not be touched again. Safe to call twice and at any time."""
        self._released = True
        self._free_if_unused()

    def add_reader(self) -> None:
        """A message told a worker to read the block."""
        self._readers += 1

    def end_reader(self) -> None:
        """A worker reads the block no more."""
        self._readers -= 1
        self._free_if_unused()

    def _free_if_unused(self) -> None:
        if self._released and not self._readers:
            self._arena.free(self._block)

    def __enter__(self) -> InputBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class InputArena:
    """Blocks for inputs of this frontend, up to `nbytes` together."""

    def __init__(self, paths: RunPaths, name: str, nbytes: int) -> None:
        """`name` is that of the slot of the frontend or bridge."""
        self._paths, self._name, self._nbytes = paths, name, nbytes
        self._arena: Arena | None = None
        self._leases: LeaseTable | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self.on_room: Callable[[], None] = lambda: None
        """Called when a block was given back, and when there will never be one."""

    @property
    def inputs(self) -> Inputs:
        """Where the arena is."""
        assert self._arena is not None
        return Inputs(str(self._arena.path), self._arena.epoch)

    @property
    def used_nbytes(self) -> int:
        """Bytes of reserved blocks, rounded up to whole blocks."""
        return self._leases.used_nbytes if self._leases is not None else 0

    @property
    def capacity_nbytes(self) -> int:
        """Largest input that could ever fit; 0 once there is no memory for the file."""
        return 0 if self._closed else max(0, self._nbytes - BLOCKS_OFFSET - STAMP_NBYTES)

    async def reserve(self, nbytes: int) -> InputBlock | None:
        """A block whose `buffer` is `nbytes` of writable memory; None when there is no room now, or never will be.

        Without a block the payload travels as bytes, which costs two more copies. The block is the caller's until
        `release`; whatever happens to the call, releasing is safe.
        """
        if self._closed or nbytes > self.capacity_nbytes:
            return None
        if self._leases is None:
            await self._open()
        leases = self._leases_of_open()
        block = leases.reserve(nbytes) if leases is not None else None
        return None if block is None or leases is None else InputBlock(block, leases.data(block), self)

    def _leases_of_open(self) -> LeaseTable | None:
        return None if self._closed else self._leases

    async def _open(self) -> None:
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._create())
        await asyncio.shield(self._opening)

    async def _create(self) -> None:
        """Make the file; preallocating takes some 100 ms. Without room for the file, inputs travel as bytes."""
        epoch = secrets.token_hex(8)
        path = self._paths.input_arena(self._name, epoch)
        try:
            arena = await asyncio.to_thread(Arena, path, self._nbytes, epoch, "arena.input_bytes")
        except (ConfigError, OSError) as error:
            log.error("no shared memory for large inputs: %s", error)
            self._closed = True
            return
        self._arena, self._leases = arena, LeaseTable(arena)
        if self._closed:
            arena.close()

    def free(self, block: Block) -> None:
        """Give a block back; its readers must be gone."""
        if self._leases is not None:
            self._leases.discard(block)
        self.on_room()

    def verify(self) -> None:
        """Assert the invariants of the arena."""
        if self._leases is not None:
            self._leases.verify()

    def close(self) -> None:
        """Unlink the file; a process that maps the file keeps the memory until its mapping ends."""
        self._closed = True
        if self._arena is not None:
            self._arena.close()
        self.on_room()


def view_of(paths: RunPaths, inputs: Inputs) -> ArenaView:
    """A worker's view of the arena that a frontend names. Raises `ProtocolError` for anything that is not one."""
    path = Path(inputs.path)
    if path.parent != paths.shm or not paths.is_input_arena(path.name):
        raise ProtocolError("the path is not that of an input arena")
    try:
        return ArenaView(path, inputs.epoch)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"the input arena cannot be mapped: {error}") from error
