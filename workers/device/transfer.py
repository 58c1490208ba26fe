"""Arrays to the device and back without a halt: the host goes on while the device still computes what came before.

A plain copy to CUDA waits until the device has done all earlier work of its stream. The copies of this module
pass through pinned memory, which torch keeps until the device has read the memory. On a CPU both directions cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray


def sent(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on the device, in the order of the present stream. On a CPU both share their memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fetched(tensor: torch.Tensor) -> Callable[[], NDArray[Any]]:
    """Begin to copy a tensor to the host; the result waits for this copy alone and gives the content as an array."""
    if not tensor.is_cuda:
        return tensor.numpy
    near, done = torch.empty_like(tensor, device="cpu", pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    near.copy_(tensor, non_blocking=True)
    done.record()

    def read() -> NDArray[Any]:
        done.synchronize()
        return near.numpy()

    return read
