"""Which catalog each frontend serves, so that one of them can wait until all know a new model.

Each frontend notices changed files for itself, a second or two after they have settled. What it serves is told in a
small file of its slot in the run directory.
"""

from __future__ import annotations

import hashlib
import secrets

from ipc.catalog import Catalog
from ipc.liveness import is_held
from ipc.paths import RunPaths

_PREFIX = "catalog-"


class Agreement:
    """One frontend's part of it; `name` is that of its slot (`frontend-0`)."""

    def __init__(self, paths: RunPaths, name: str, catalog: Catalog) -> None:
        self._paths, self._name, self._catalog = paths, name, catalog
        self._told: object = None
        self._digest = b""

    def tell(self) -> None:
        """Tell the others what this frontend serves, if that has changed."""
        files = self._catalog.files
        if files is self._told:
            return
        self._told, self._digest = files, hashlib.sha256(repr(sorted(files)).encode()).digest()
        draft = self._paths.control() / f".{secrets.token_hex(8)}"
        draft.write_bytes(self._digest)
        draft.replace(self._paths.control() / f"{_PREFIX}{self._name}")

    def reached(self) -> bool:
        """Whether every frontend that lives serves what this one does."""
        self.tell()
        for path in self._paths.control().glob(f"{_PREFIX}*"):
            other = path.name.removeprefix(_PREFIX)
            if other == self._name or not is_held(self._paths.lock(other)):
                continue
            if path.read_bytes() != self._digest:
                return False
        return True
