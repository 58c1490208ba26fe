"""What each frontend serves, so that a load by name can wait until all frontends know the new model.

Each frontend notices changed files for itself, a second or two after they have settled, and hears from the workers what
they have loaded. Digests of both stand in a row of the store for each frontend (`ipc.store`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable

from ipc.catalog.entries import Catalog
from ipc.errors import PenstockError
from ipc.processes.liveness import is_held
from ipc.processes.paths import RunPaths
from ipc.store.store import Store, Table

log = logging.getLogger(__name__)


class Agreement:
    """One frontend's part of it; `name` is that of its slot (`frontend-0`)."""

    def __init__(
        self,
        paths: RunPaths,
        store: Store,
        name: str,
        catalog: Catalog,
        loaded: Callable[[], Iterable[object]] = lambda: (),
    ) -> None:
        """`loaded` is what the workers have loaded as far as this frontend knows."""
        self._paths, self._name, self._catalog, self._loaded = paths, name, catalog, loaded
        self._table = Table(store, "catalogs", list[str])
        self._read: object = None
        self._served = ["", ""]
        """Digests of the files that this frontend has read, and of what it serves by what it knows of the workers."""

    def tell(self) -> None:
        """Tell the others what this frontend serves, if that has changed."""
        served = self._present()
        if served != self._served:
            self._served = served
            self._table.change_soon(self._write, self._told)

    def reached(self, *, entirely: bool = False) -> bool:
        """Whether every frontend that lives has read the files that this one has.

        `entirely`: and serves what this one does, by what it knows of the workers.
        """
        self.tell()
        compared = 2 if entirely else 1
        return all(
            served[:compared] == self._served[:compared]
            for other, served in self._table.rows().items()
            if other != self._name and is_held(self._paths.lock(other))
        )

    def _present(self) -> list[str]:
        files = self._catalog.files
        known = self._served[0] if files is self._read else _digest(files)
        self._read = files
        return [known, _digest([*self._catalog, *self._loaded()])]

    def _write(self, rows: dict[str, list[str]]) -> None:
        # NOTE: the latest digests, whichever of two writes comes last.
        rows[self._name] = self._served

    def _told(self, error: OSError | PenstockError | None) -> None:
        if error is not None:
            log.error("other frontends cannot be told what this one serves: %s", error)
            self._served = ["", ""]


def _digest(found: Iterable[object]) -> str:
    return hashlib.sha256(repr(sorted(found, key=repr)).encode()).hexdigest()
