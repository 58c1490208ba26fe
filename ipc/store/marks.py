"""Models that somebody loaded or unloaded by name, remembered until the server starts again.

Frontends load for no request what was unloaded. A worker that starts again loads what was loaded, and leaves what was
unloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ipc.metrics.infer_families import split_id
from ipc.store.store import Change, Store

log = logging.getLogger(__name__)

_KIND = "marks"
_LOADED, _UNLOADED = b"loaded", b"unloaded"


class Marks:
    """The marks of one server; models are named without their versions."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(self, model: str, *, loaded: bool, until_ns: int = 0) -> None:
        """Somebody loaded the model by name, or unloaded it. Raises as `Store.write` does."""
        value = _LOADED if loaded else _UNLOADED
        await self._store.write(lambda change: change.put(_KIND, model, value), until_ns)

    async def restore(self, model: str, before: bool | None) -> None:
        """A load has failed: let the mark be what `get` gave before, unless somebody has unloaded the model meanwhile.

        Raises as `Store.write` does.
        """

        def how(change: Change) -> None:
            row = change.get(_KIND, model)
            if row is None or row.value != _LOADED:
                return
            if before is None:
                change.remove(_KIND, model)
            else:
                change.put(_KIND, model, _LOADED if before else _UNLOADED)

        await self._store.write(how)

    def get(self, model: str) -> bool | None:
        """Whether the model was loaded (true) or unloaded (false) last; None: neither. Raises `OSError`."""
        row = self._store.rows(_KIND).get(model)
        return None if row is None else row.value == _LOADED

    def adjust(self, chosen: Iterable[str], served: Iterable[str]) -> list[str]:
        """Catalog ids to load at the start: the `chosen` ones that were not unloaded, and those that were loaded.

        None at all if the marks cannot be read.
        """
        names = set(chosen)
        try:
            marks = [(entry, self.get(split_id(entry)[0])) for entry in served]
        except OSError as error:
            log.error("which models were loaded by name cannot be read: %s", error.strerror)
            return []
        return [entry for entry, mark in marks if mark or (mark is None and entry in names)]
