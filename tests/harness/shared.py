"""A client's POSIX shared memory, and requests of KServe v2 that use it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ipc.processes.paths import SHM_ROOT
from tests.harness.server import Answer, Server


class ClientObject:
    """One object in /dev/shm, under a name that only this run has."""

    def __init__(self, nbytes: int) -> None:
        self.key = f"client_{secrets.token_hex(8)}"
        self.path = Path(SHM_ROOT, self.key)
        self.path.write_bytes(bytes(nbytes))

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        """Put an array's bytes at `offset`."""
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(array.tobytes())

    def read(self, dtype: str, offset: int, count: int) -> np.ndarray:
        """`count` elements from `offset`."""
        return np.fromfile(self.path, dtype, count, offset=offset)

    def truncate(self, nbytes: int) -> None:
        """Let it shrink."""
        os.truncate(self.path, nbytes)


@contextmanager
def client_object(nbytes: int) -> Iterator[ClientObject]:
    """An object that is removed at the end, if nobody has done so."""
    made = ClientObject(nbytes)
    try:
        yield made
    finally:
        made.path.unlink(missing_ok=True)


def register(server: Server, name: str, key: str, nbytes: int, offset: int = 0) -> Answer:
    """Register a system region."""
    body = {"key": key, "offset": offset, "byte_size": nbytes}
    return server.post(f"/v2/systemsharedmemory/region/{quote(name, safe='')}/register", body)


def unregister(server: Server, name: str) -> Answer:
    """Unregister a system region."""
    return server.request("POST", f"/v2/systemsharedmemory/region/{name}/unregister")


def in_region(name: str, region: str, offset: int, nbytes: int, **tensor: Any) -> dict[str, Any]:
    """A tensor of a request, whose bytes are in a region."""
    parameters = {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": nbytes,
    }
    return {"name": name, **tensor, "parameters": parameters}


def infer(server: Server, model: str, request: Mapping[str, Any], timeout_s: float = 60) -> Answer:
    """POST an inference in JSON."""
    body = json.dumps(request).encode()
    return server.request("POST", f"/v2/models/{model}/infer", body, timeout_s=timeout_s)
