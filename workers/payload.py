"""Raw tensors that came with an infer call, and the shared memory of clients that it names.

What is read here is trusted in nothing: a place outside of the payload is refused, whatever the frontend has checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ipc.datatypes import BYTES
from ipc.errors import InvalidInput, Unsupported
from ipc.messages import Region, TensorInput, TensorOutput
from workers.regions import ClientMemory, OpenRegion


class Payload:
    """The payload of one request; `memory` opens regions of clients."""

    __slots__ = ("_data", "_memory")

    def __init__(self, data: memoryview, memory: ClientMemory | None = None) -> None:
        self._data, self._memory = data, memory

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
