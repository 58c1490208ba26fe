"""What comes back for a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from frontend.engine.local.channel import Channel
from frontend.engine.local.delivery import Delivery
from ipc.memory import tensors
from ipc.wire.messages import ItemError, TensorInfo, Timing, Trace


class Reply:
    """A result whose tensors may lie in a leased block; use it as a context manager."""

    def __init__(self, channel: Channel, delivery: Delivery) -> None:
        self._channel, self._arena = channel, delivery.arena
        self._result = delivery.result
        self._inline = memoryview(delivery.inline)
        self._copies: dict[str, np.ndarray] | None = None
        block = delivery.result.block
        if block is not None and delivery.arena is not None:
            self._bytes = delivery.arena.data(block.offset, block.nbytes, block.generation)
        else:
            self._bytes = self._inline if delivery.kept is None else memoryview(delivery.kept)

    @property
    def tokens(self) -> list[int]:
        """Tokens used per item, special tokens included."""
        return self._result.tokens

    @property
    def truncated(self) -> list[int]:
        """Indices of items that were cut to the model's length."""
        return self._result.truncated

    @property
    def errors(self) -> list[ItemError]:
        """Items that failed on their own."""
        return self._result.errors

    @property
    def timing(self) -> Timing:
        """Phases at the worker."""
        return self._result.timing

    @property
    def trace(self) -> Trace | None:
        """Instants at the worker, when the request is traced."""
        return self._result.trace

    @property
    def worker(self) -> int:
        """Slot of the worker that answered."""
        return self._channel.slot

    @property
    def uuid(self) -> str:
        """Of the device of that worker; `cpu` for none."""
        return self._channel.uuid

    @property
    def leased(self) -> bool:
        """Whether the tensors lie in the arena and a lease is held."""
        return self._arena is not None

    def tensors(self) -> dict[str, np.ndarray]:
        """Read-only views by name; valid while the lease is held. Private copies after `repeat`."""
        if self._copies is not None:
            return self._copies
        views = {ref.name: tensors.view(self._bytes, ref) for ref in self._result.tensors}
        return views | {ref.name: tensors.view(self._inline, ref) for ref in self._result.loose}

    def repeat(self, firsts: Sequence[int]) -> None:
        """Give each item the rows of item `firsts[index]`, in private copies; the lease is the caller's to end then.

        Any thread may call this. Raises `LeaseRevoked` when the block was taken back meanwhile.
        """
        copies = {}
        for name, values in self.tensors().items():
            counts = self._result.rows.get(name)
            if counts is None:
                copies[name] = values[list(firsts)]
            else:
                starts = [0, *accumulate(counts)]
                copies[name] = np.concatenate([values[starts[at] : starts[at] + counts[at]] for at in firsts])
        self.check()
        self._copies = copies
        rows = {name: [counts[at] for at in firsts] for name, counts in self._result.rows.items()}
        self._result = msgspec.structs.replace(self._result, rows=rows)

    @property
    def infos(self) -> list[TensorInfo]:
        """The outputs of an infer call, in the order they were asked for."""
        return self._result.infos

    def raw(self, name: str) -> memoryview:
        """Raw bytes of one output of an infer call, read-only; valid while the lease is held.

        Raises `KeyError` for one that was written to a region of the client.
        """
        for ref in self._result.tensors:
            if ref.name == name:
                return tensors.raw(self._bytes, ref)
        raise KeyError(name)

    def rows(self, name: str) -> list[int]:
        """Rows per item of a tensor that has more or fewer than one."""
        return self._result.rows[name]

    def check(self) -> None:
        """Raise `LeaseRevoked` when the block was taken back; call it after every copy."""
        if self._arena is not None and self._result.block is not None:
            self._arena.check(self._result.block.offset, self._result.block.generation)

    def release(self) -> None:
        """End the lease; safe to call twice."""
        if self._arena is not None:
            arena, self._arena = self._arena, None
            self._channel.release(self._result, arena)

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
