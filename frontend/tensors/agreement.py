"""What each frontend serves, so that one of them can wait until all know a new model.

Each frontend notices changed files for itself, a second or two after they have settled, and hears from the workers what
they have loaded. Both are told in a small file of its slot in the run directory.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable

from ipc.catalog.entries import Catalog
from ipc.processes.liveness import is_held
from ipc.processes.paths import RunPaths

_PREFIX = "catalog-"


class Agreement:
    """One frontend's part of it; `name` is that of its slot (`frontend-0`)."""

    def __init__(
        self,
        paths: RunPaths,
        name: str,
        catalog: Catalog,
        loaded: Callable[[], Iterable[object]] = lambda: (),
    ) -> None:
        """`loaded` is what the workers have loaded as far as this frontend knows."""
        self._paths, self._name, self._catalog, self._loaded = paths, name, catalog, loaded
        self._read: object = None
        self._files = self._told = b""

    def tell(self) -> None:
        """Tell the others what this frontend serves, if that has changed."""
        files = self._catalog.files
        if files is not self._read:
            self._read, self._files = files, _digest(files)
        telling = self._files + _digest([*self._catalog, *self._loaded()])
        if telling == self._told:
            return
        draft = self._paths.control() / f".{secrets.token_hex(8)}"
        draft.write_bytes(telling)
        draft.replace(self._paths.control() / f"{_PREFIX}{self._name}")
        self._told = telling

    def reached(self, *, entirely: bool = False) -> bool:
        """Whether every frontend that lives has read the files that this one has.

        `entirely`: and serves what this one does, by what it knows of the workers.
        """
        self.tell()
        expected = self._told if entirely else self._files
        for path in self._paths.control().glob(f"{_PREFIX}*"):
            other = path.name.removeprefix(_PREFIX)
            if other == self._name or not is_held(self._paths.lock(other)):
                continue
            if not path.read_bytes().startswith(expected):
                return False
        return True


def _digest(found: Iterable[object]) -> bytes:
    return hashlib.sha256(repr(sorted(found, key=repr)).encode()).digest()
