"""Where a job's inputs are read: raw tensors that came with the call (`Payload`), and shared memory of clients.

A payload is trusted in nothing: a place outside of the payload is refused, whatever the frontend has checked. Memory of
clients is read and written by the worker itself:

1. `ClientMemory.open` opens what an infer call names and looks at its size; the request keeps what it was given until
   it ends, so that neither a name that goes away nor an unregistered region takes the memory from under it.
2. POSIX objects are read and written with pread and pwrite: one that shrank meanwhile is an error of the request and
   not a SIGBUS of the worker. Only an operator who trusts his clients lets inputs be mapped
   (`shared_memory.map_inputs`), which saves their copy.
3. CUDA memory (`CudaMemory`) is a tensor on the device. The memory stays open while its region is registered or a
   request uses the memory.

Nothing has to be closed: descriptors and handles go with the last request that holds them.

`CudaMemory` opens device memory of another process by its CUDA IPC handle, through the CUDA runtime that torch has
loaded. The driver is asked how large the allocation really is: bytes outside of the allocation would end the worker,
not the request.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ipc.errors import InvalidInput, ShmExhausted, Unsupported
from ipc.memory import copies
from ipc.memory.datatypes import BYTES
from ipc.processes.paths import SHM_ROOT
from ipc.settings import Settings
from ipc.store.regions import HANDLE_NBYTES, RegionTable, check_size, object_name, open_object
from ipc.store.store import Store
from ipc.wire.messages import Call, InferCall, Region, TensorInput, TensorOutput

log = logging.getLogger(__name__)

_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess, the only flag there is."""
LOOK_EVERY_S = 1.0
"""How often it is looked which CUDA regions are still registered."""


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
        copy = np.empty(opened.nbytes, np.uint8).data
        opened.read(copy)
        return copy

    def targets(self, outputs: Sequence[TensorOutput]) -> dict[str, OpenRegion]:
        """The regions that outputs are written to, by the outputs' names."""
        return {output.name: self._open(output.region) for output in outputs if output.region is not None}

    def _open(self, region: Region) -> OpenRegion:
        if self._memory is None:
            raise Unsupported("this worker has no access to shared memory of clients")
        return self._memory.open(region)


NOTHING = Payload(memoryview(b""))
"""Of calls that have none."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t; passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_NBYTES)]


class CudaMemory:
    """One allocation of another process, open until nobody holds this object or one of its tensors."""

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


class _Object:
    """A client's POSIX object, open until nobody holds this."""

    def __init__(self, fd: int, facts: os.stat_result) -> None:
        self.fd, self.identity = fd, (facts.st_dev, facts.st_ino)
        # NOTE: not `__del__`, which runs before weak references end: another thread could take the object out of
        # `ClientMemory` again while its descriptor is being closed.
        weakref.finalize(self, os.close, fd).atexit = False


class OpenRegion:
    """Bytes of a client's memory, held open while this object lives. Any thread."""

    def __init__(self, region: Region, source: _Object | CudaMemory, mapped: bool = False) -> None:
        """`mapped`: `view` is allowed."""
        self.nbytes = region.nbytes
        self.mapped = mapped and isinstance(source, _Object) and region.nbytes > 0
        self._region, self._source = region, source

    @property
    def on_device(self) -> bool:
        """Whether it is CUDA memory, which `tensor` gives without a copy."""
        return isinstance(self._source, CudaMemory)

    def view(self) -> memoryview:
        """The whole region, read-only and without a copy; what the client writes meanwhile shows. Only where `mapped`.

        Raises `InvalidInput` when the object has shrunk.

        NOTE: to touch it after the client has cut its object off ends this process with SIGBUS.
        """
        if not self.mapped or not isinstance(self._source, _Object):
            raise TypeError("this region is not to be mapped")
        start = self._region.offset % mmap.ALLOCATIONGRANULARITY
        place = self._region.offset - start
        try:
            pages = mmap.mmap(self._source.fd, start + self.nbytes, access=mmap.ACCESS_READ, offset=place)
        except (OSError, ValueError):
            raise self._shrunk() from None
        return memoryview(pages)[start:]

    def read(self, target: memoryview) -> None:
        """Copy all of it into `target` (`nbytes` writable bytes). Raises `InvalidInput` when the object has shrunk."""
        if target.nbytes != self.nbytes:
            raise ValueError(f"{target.nbytes} bytes of room for {self.nbytes}")
        copies.count("region", self.nbytes)
        if isinstance(self._source, CudaMemory):
            if self.nbytes:
                torch.frombuffer(target, dtype=torch.uint8).copy_(self.tensor())
            return
        done = 0
        while done < self.nbytes:
            got = os.preadv(self._source.fd, [target[done:]], self._region.offset + done)
            if not got:
                raise self._shrunk()
            done += got

    def write(self, data: memoryview) -> None:
        """Copy `data` (at most `nbytes` bytes, C-contiguous) to its start.

        Raises `InvalidInput` when it is too small, with both sizes, or when the object has shrunk.
        """
        if data.nbytes > self.nbytes:
            raise InvalidInput(
                f"shared memory region is too small for the output: {self.nbytes} bytes given, {data.nbytes} needed"
            )
        copies.count("region", data.nbytes)
        if isinstance(self._source, CudaMemory):
            if data.nbytes:
                self.tensor()[: data.nbytes].copy_(torch.frombuffer(data, dtype=torch.uint8))
            return
        # NOTE: a write behind the end would let the object grow again.
        if self._region.offset + data.nbytes > os.fstat(self._source.fd).st_size:
            raise self._shrunk()
        flat, done = data.cast("B"), 0
        try:
            while done < flat.nbytes:
                done += os.pwrite(self._source.fd, flat[done:], self._region.offset + done)
        except OSError:
            raise InvalidInput("shared memory region: it has no room for what is written to it") from None

    def tensor(self) -> torch.Tensor:
        """CUDA memory as uint8 [nbytes] on its device, without a copy; keeps the region open. CUDA regions only."""
        if not isinstance(self._source, CudaMemory):
            raise TypeError("a POSIX object is no tensor")
        return self._source.tensor(self._region.offset, self.nbytes)

    def _shrunk(self) -> InvalidInput:
        last = self._region.offset + self.nbytes
        return InvalidInput(f"shared memory region: its object has shrunk below the {last} bytes registered")


class Place:
    """Room for the copies of one request, until nobody holds this."""

    __slots__ = ("__weakref__",)


class CopyRoom:
    """Bytes that the copies of all requests may take. One thread reserves, any thread may let go of a `Place`."""

    def __init__(self, most_nbytes: int, on_room: Callable[[], None]) -> None:
        """`on_room` is called, by any thread, when a place ended after one was refused."""
        self._most_nbytes, self._on_room = most_nbytes, on_room
        self._used_nbytes = 0
        self._given: deque[int] = deque()
        self._wanted = False

    def check(self, nbytes: int) -> None:
        """Raise `InvalidInput` for a request whose copies never fit."""
        if nbytes > self._most_nbytes:
            raise InvalidInput(
                f"inputs in shared memory regions: {nbytes} bytes have to be copied, "
                f"shared_memory.max_copy_bytes allows {self._most_nbytes}"
            )

    def reserve(self, nbytes: int) -> Place | None:
        """Room for so many bytes; None when there is none now."""
        # NOTE: wanted before the look: a place that ends in between is seen here, or wakes who waits.
        self._wanted = True
        while self._given:
            self._used_nbytes -= self._given.popleft()
        if self._used_nbytes + nbytes > self._most_nbytes:
            return None
        self._wanted = False
        self._used_nbytes += nbytes
        place = Place()
        weakref.finalize(place, self._give, nbytes).atexit = False
        return place

    def _give(self, nbytes: int) -> None:
        # NOTE: without a lock, since it may run wherever the last hold ends, also inside of `reserve`.
        self._given.append(nbytes)
        if self._wanted:
            self._wanted = False
            self._on_room()


class ClientMemory:
    """Opens the regions that calls name. One per worker."""

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        objects: Path = SHM_ROOT,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`objects` is the directory in which shm_open finds its objects; `on_room` is that of `room`."""
        self.room = CopyRoom(settings.shared_memory.max_copy_bytes, on_room)
        self._settings, self._device = settings.shared_memory, device
        self._objects = objects
        self._open: weakref.WeakValueDictionary[str, _Object] = weakref.WeakValueDictionary()
        self._cuda: dict[str, CudaMemory] = {}
        self._table = RegionTable(Store(settings.paths), settings.shared_memory.max_regions)
        self._lock = threading.Lock()
        self._next_look = 0.0

    def open(self, region: Region) -> OpenRegion:
        """Open a region and check that it has all its bytes. Endpoint's or a preparing thread.

        Raises `InvalidInput` when it cannot be opened or is too small, `Unsupported` for CUDA memory without CUDA.
        """
        if not self._settings.enabled:
            raise Unsupported("shared memory regions are not offered (shared_memory.enabled)")
        if region.offset < 0 or region.nbytes < 0:
            raise InvalidInput("shared memory region: negative offset or size")
        with self._lock:
            source = self._cuda_source(region) if region.kind == "cuda" else self._object(region)
            return OpenRegion(region, source, self._settings.map_inputs)

    def copies(self, tensor: TensorInput) -> bool:
        """Whether an input is copied to private memory when it is read."""
        region, mapped = tensor.region, self._settings.map_inputs and tensor.datatype != BYTES
        return region is not None and region.kind != "cuda" and not mapped

    def tick(self) -> None:
        """Often, from the endpoint's tick: once a second close CUDA memory whose region was unregistered."""
        now = time.monotonic()
        if not self._cuda or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        registered = {entry.key for entry in self._table.entries() if entry.kind == "cuda"}
        with self._lock:
            for handle in [handle for handle in self._cuda if handle not in registered]:
                del self._cuda[handle]

    def _object(self, region: Region) -> _Object:
        name = object_name(region.key, self._settings.key_prefix)
        # PERF: the tensors of one request, and requests at the same time, share a descriptor.
        source = self._open.get(name)
        if source is None or source.identity != _identity(self._objects / name):
            fd = open_object(self._objects, name, name)
            source = self._open[name] = _Object(fd, os.fstat(fd))
        check_size(source.fd, region.offset, region.nbytes, name)
        return source

    def _cuda_source(self, region: Region) -> CudaMemory:
        if self._device.type != "cuda":
            raise Unsupported("CUDA shared memory is not offered: this worker runs on the CPU")
        memory = self._cuda.get(region.key)
        if memory is None:
            memory = self._cuda[region.key] = CudaMemory(bytes.fromhex(region.key), self._device)
        memory.check(region.offset, region.nbytes)
        return memory


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
