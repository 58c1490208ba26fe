"""Shared memory of clients by region name: registered through any frontend, known to all of them at once.

1. `register_system` opens the object once, checks its size, and puts a row into the table of the server
   (`ipc.store.regions`), which outlives this process.
2. `resolve` turns a tensor's use of a region into the bytes that a worker reads or writes. A frontend reads no region.
3. `unregister` removes the row, once the requests that use the region (`holding`) have ended. Requests that a worker
   has begun hold the memory itself and go on.

The protocol decides whether a caller may call this (admin scope); `shared_memory.enabled` decides whether anybody may.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from frontend.tensors.request import RegionUse
from ipc.errors import InvalidInput, RegionNotFound, Unsupported
from ipc.machine import count_gpus
from ipc.processes.paths import SHM_ROOT
from ipc.settings import Settings
from ipc.store.regions import (
    HANDLE_NBYTES,
    MOST_BYTES,
    Kind,
    RegionEntry,
    RegionTable,
    check_size,
    object_name,
    open_object,
    part_of,
)
from ipc.store.store import Store
from ipc.wire.messages import Region

log = logging.getLogger(__name__)


class ClientRegions:
    """The regions of this server, as protocols see them."""

    def __init__(
        self, settings: Settings, store: Store, objects: Path = SHM_ROOT, *, are_read: bool = True
    ) -> None:
        """`objects` is the directory in which shm_open finds its objects, `are_read` is `Engine.reads_regions`."""
        self._are_read = are_read
        self._settings, self._objects = settings.shared_memory, objects
        self._table = RegionTable(store, settings.shared_memory.max_regions)
        self._gpu = settings.worker.device != "cpu" and count_gpus() > 0

    @property
    def offered(self) -> bool:
        """Whether system regions are offered: `shared_memory.enabled`, and models run on this host."""
        return self._settings.enabled and self._are_read

    @property
    def cuda_offered(self) -> bool:
        """Whether CUDA regions are offered: `shared_memory.enabled`, and workers use a GPU of this host."""
        return self.offered and self._gpu

    async def register_system(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Register bytes of a POSIX object. Raises as `RegionTable.add` does, and `Unsupported`."""
        self._check_offered("system")
        self._check_size(offset, nbytes)
        fd = open_object(self._objects, object_name(key, self._settings.key_prefix), key)
        try:
            check_size(fd, offset, nbytes, key)
        finally:
            os.close(fd)
        await self._table.add(RegionEntry(name, "system", key, offset, nbytes))
        log.info("shared memory region %a registered: %d bytes", name, nbytes)

    async def register_cuda(self, name: str, handle: bytes, device: int, nbytes: int) -> None:
        """Register device memory by its 64-byte IPC handle. Raises as `RegionTable.add` does, and `Unsupported`."""
        self._check_offered("cuda")
        self._check_size(0, nbytes)
        if len(handle) != HANDLE_NBYTES:
            raise InvalidInput(f"raw_handle: expected {HANDLE_NBYTES} bytes, got {len(handle)}")
        if not 0 <= device < count_gpus():
            raise InvalidInput(f"device_id: {device} is no device of this server, it has {count_gpus()}")
        await self._table.add(RegionEntry(name, "cuda", handle.hex(), 0, nbytes, device))
        log.info("CUDA memory region %a registered: %d bytes of device %d", name, nbytes, device)

    async def unregister(self, kind: Kind | None, name: str | None) -> int:
        """Forget a region, or all (None), of a kind or of both kinds (None); returns the number of forgotten regions.

        An unknown name is no error. Raises `Unsupported` where shared memory is not offered, except for CUDA regions.
        """
        self._check_removable(kind)
        gone = await self._table.remove(lambda it: name in (None, it.name) and kind in (None, it.kind))
        log.info("unregistered %d shared memory regions (%s)", gone, "all" if name is None else ascii(name))
        return gone

    def status(self, kind: Kind | None, name: str = "") -> list[RegionEntry]:
        """All regions of a kind (None: both) by name, or the one that is named.

        Raises `RegionNotFound` for an unknown name, `Unsupported` where the kind is not offered.
        """
        self._check_offered(kind)
        if not name:
            return [entry for entry in self._table.entries() if kind in (None, entry.kind)]
        entries = [entry for entry in self.status(None) if entry.name == name]
        if not entries:
            raise RegionNotFound(f"Unable to find shared memory region: '{name[:200]}'")
        if kind not in (None, entries[0].kind):
            raise RegionNotFound(f"Unable to find {kind} shared memory region: '{name[:200]}'")
        return entries

    def holding(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Keep the regions of a request listed inside the context. Raises `RegionNotFound`, `Unsupported`."""
        self._check_offered(None)
        return self._table.holding(names)

    def resolve(self, use: RegionUse) -> Region:
        """The bytes of a tensor's region parameters, for a call to a worker.

        Raises `Unsupported`, `RegionNotFound`, or `InvalidInput` for what lies outside the region.
        """
        self._check_offered(None)
        return part_of(self._table.find(use.name, holding=True), use.offset, use.nbytes)

    def _check_offered(self, kind: Kind | None) -> None:
        if not self._settings.enabled:
            raise Unsupported("shared memory regions are not offered (shared_memory.enabled)")
        if not self._are_read:
            raise InvalidInput("shared memory regions are not offered: models run on other hosts")
        if kind == "cuda" and not self._gpu:
            raise Unsupported("CUDA shared memory is not offered: this server has no GPU")

    def _check_removable(self, kind: Kind | None) -> None:
        # NOTE: clients unregister all regions of both kinds before they begin, also at servers without GPUs.
        if kind != "cuda":
            self._check_offered(kind)

    def _check_size(self, offset: int, nbytes: int) -> None:
        most = self._settings.max_region_bytes
        if not 0 < nbytes <= most:
            raise InvalidInput(
                f"byte_size: expected 1 to {most} (shared_memory.max_region_bytes), got {nbytes}"
            )
        if not 0 <= offset <= MOST_BYTES - nbytes:
            raise InvalidInput(f"offset: expected 0 to {MOST_BYTES - nbytes}, got {offset}")
