"""A result as it reaches a frontend, before anybody reads it."""

from __future__ import annotations

from dataclasses import dataclass

from ipc.memory.arena import ArenaView
from ipc.wire.messages import Result


@dataclass(slots=True)
class Delivery:
    """A result with the bytes that its tensors lie in: an arena to lease from, an inline frame, or a private copy.

    `kept` stands in the place of a block whose lease has ended already.
    """

    result: Result
    arena: ArenaView | None
    inline: bytes
    kept: bytes | None = None
