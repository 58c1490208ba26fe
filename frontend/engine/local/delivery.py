"""What a worker has sent for a request: a result, and the right to read its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from frontend.engine.answer import Answer
from ipc.memory.arena import ArenaView
from ipc.wire.messages import BlockRef, Result


class Sender(Protocol):
    """The worker that sent a result, as the channel of the worker knows the worker."""

    worker: str
    uuid: str

    def release(self, result: Result, arena: ArenaView) -> None:
        """End the lease of a result."""


@dataclass(slots=True, frozen=True)
class ArenaLease:
    """The lease of a result in a worker's arena."""

    sender: Sender
    result: Result
    arena: ArenaView
    block: BlockRef

    def check(self) -> None:
        """Raise `LeaseRevoked` when the block was taken back."""
        self.arena.check(self.block.offset, self.block.generation)

    def release(self) -> None:
        """Tell the worker that no reader of the block is left."""
        self.sender.release(self.result, self.arena)


@dataclass(slots=True)
class Delivery:
    """A result with the bytes that its tensors lie in: an arena to lease from, an inline frame, or a private copy.

    `kept` stands in the place of a block whose lease has ended already.
    """

    result: Result
    arena: ArenaView | None
    inline: bytes
    kept: bytes | None = None

    def answer(self, sender: Sender) -> Answer:
        """The result and its bytes as an `Answer`. Raises `LeaseRevoked` when the block was taken back already."""
        inline, block, arena = memoryview(self.inline), self.result.block, self.arena
        if block is None or arena is None:
            data = inline if self.kept is None else memoryview(self.kept)
            return Answer(self.result, data, inline, worker=sender.worker, uuid=sender.uuid)
        data = arena.data(block.offset, block.nbytes, block.generation)
        lease = ArenaLease(sender, self.result, arena, block)
        return Answer(self.result, data, inline, lease=lease, worker=sender.worker, uuid=sender.uuid)
