"""Device memory of another process, opened by its CUDA IPC handle through the CUDA runtime that torch has loaded.

The driver is asked how large the allocation really is: bytes outside of it would end the worker, not the request.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any

import torch

from ipc.errors import InvalidInput
from ipc.store.regions import HANDLE_NBYTES

log = logging.getLogger(__name__)

_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess, the only flag there is."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t; passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_NBYTES)]


class CudaMemory:
    """One allocation of another process, open until nobody holds this or a tensor of it."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        """Open it in the context of `device`. Raises `InvalidInput` when that cannot be done."""
        self._device, self._address = device, 0
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            code = _runtime().cudaIpcOpenMemHandle(
                ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
        if code or not pointer.value:
            # NOTE: the code stays behind as the runtime's last error, which torch would take for one of its own.
            _runtime().cudaGetLastError()
            raise InvalidInput(
                f"Unable to open CUDA memory handle (CUDA code {code}); its owner must be alive, another process on "
                "this host, and its device one of this worker"
            )
        self._address = pointer.value
        self._nbytes = self._measured()

    def check(self, offset: int, nbytes: int) -> None:
        """Raise `InvalidInput` unless the allocation has all these bytes."""
        if offset + nbytes > self._nbytes:
            raise InvalidInput(
                f"Invalid CUDA memory region: bytes {offset} to {offset + nbytes} of {self._nbytes}"
            )

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device, without a copy; it keeps the memory open."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Span(self, self._address + offset, nbytes), device=self._device)

    def __del__(self) -> None:
        if self._address:
            code = _runtime().cudaIpcCloseMemHandle(ctypes.c_void_p(self._address))
            if code:
                log.warning("CUDA memory of a client could not be closed (CUDA code %d)", code)

    def _measured(self) -> int:
        """Bytes from the address on to the end of its allocation."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = _driver().cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(self._address)
        )
        if code:
            raise InvalidInput(f"the size of a CUDA memory region cannot be told (CUDA code {code})")
        return int(base.value) + int(size.value) - self._address


class _Span:
    """Device bytes as torch takes them (CUDA array interface, version 3)."""

    def __init__(self, memory: CudaMemory, address: int, nbytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@cache
def _runtime() -> Any:
    """The CUDA runtime, the very library that torch uses."""
    library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint]
    library.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
    return library


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
