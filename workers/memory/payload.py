"""Raw tensors that came with an infer call, and the shared memory of clients that it names.

What is read here is trusted in nothing: a place outside of the payload is refused, whatever the frontend has checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ipc.errors import InvalidInput, ShmExhausted, Unsupported
from ipc.memory.datatypes import BYTES
from ipc.wire.messages import Call, InferCall, Region, TensorInput, TensorOutput
from workers.memory.client_regions import ClientMemory, OpenRegion, Place


class Payload:
    """The payload of one request; `memory` opens regions of clients.

    What is copied of regions has its room before it is read (`reserve`), for as long as this object lives.
    """

    __slots__ = ("_copied_nbytes", "_data", "_memory", "_place")

    def __init__(self, data: memoryview, memory: ClientMemory | None = None) -> None:
        self._data, self._memory = data, memory
        self._copied_nbytes = 0
        self._place: Place | None = None

    def plan(self, call: Call) -> None:
        """Note what has to be copied for a call. Raises `InvalidInput` when that is more than there may ever be."""
        if self._memory is not None and isinstance(call, InferCall):
            self._copied_nbytes = sum([t.nbytes for t in call.inputs if self._memory.copies(t)])
            self._memory.room.check(self._copied_nbytes)

    @property
    def lacks_room(self) -> bool:
        """Whether it has no room yet for what has to be copied."""
        return self._copied_nbytes > 0 and self._place is None

    def reserve(self) -> bool:
        """Room for the copies; false when there is none now."""
        if self._memory is not None and self.lacks_room:
            self._place = self._memory.room.reserve(self._copied_nbytes)
        return not self.lacks_room

    def exhausted(self) -> ShmExhausted:
        """The error of a request that had no room in time."""
        text = f"no room for copies of {self._copied_nbytes} bytes of shared memory regions"
        return ShmExhausted(f"{text} (shared_memory.max_copy_bytes)", retry_after_s=1)

    def read(self, tensor: TensorInput) -> memoryview | torch.Tensor:
        """The raw bytes of an input; as uint8 [nbytes] on the device when they are in CUDA memory of a client.

        Raises `InvalidInput` when they lie outside of the payload or cannot be read.
        """
        if tensor.region is not None:
            return self._read_region(tensor, tensor.region)
        stop = tensor.start + tensor.nbytes
        if tensor.start < 0 or tensor.nbytes < 0 or stop > len(self._data):
            raise InvalidInput(
                f"input {tensor.name!a}: bytes {tensor.start} to {stop} of a payload of {len(self._data)} bytes"
            )
        return self._data[tensor.start : stop]

    def _read_region(self, tensor: TensorInput, region: Region) -> memoryview | torch.Tensor:
        opened = self._open(region)
        if opened.nbytes != tensor.nbytes:
            raise InvalidInput(
                f"input {tensor.name!a}: expected {tensor.nbytes} bytes, its region has {opened.nbytes}"
            )
        if opened.on_device:
            return opened.tensor()
        if opened.mapped and tensor.datatype != BYTES:
            return opened.view()
        # PERF: room that is not cleared first.
        found = np.empty(opened.nbytes, np.uint8).data
        opened.read(found)
        return found

    def targets(self, outputs: Sequence[TensorOutput]) -> dict[str, OpenRegion]:
        """The regions that outputs are written to, by the outputs' names."""
        return {output.name: self._open(output.region) for output in outputs if output.region is not None}

    def _open(self, region: Region) -> OpenRegion:
        if self._memory is None:
            raise Unsupported("this worker has no access to shared memory of clients")
        return self._memory.open(region)


NOTHING = Payload(memoryview(b""))
"""Of calls that have none."""
