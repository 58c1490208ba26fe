"""Models that somebody loaded or unloaded by name, remembered until the server starts again.

Frontends load for no request what was unloaded. A worker that starts again loads what was loaded, and leaves what was
unloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ipc.metrics.infer_families import split_id
from ipc.store.store import Store, Table

log = logging.getLogger(__name__)


class Marks:
    """The marks of one server; models are named without their versions. Changes raise as `Table.change` does."""

    def __init__(self, store: Store) -> None:
        self._table = Table(store, "marks", bool)

    async def put(self, model: str, *, loaded: bool, until_ns: int = 0) -> None:
        """Somebody loaded the model by name, or unloaded it."""
        await self._table.change(lambda rows: rows.update({model: loaded}), until_ns)

    async def restore(self, model: str, before: bool | None) -> None:
        """A load has failed: let the mark be what `get` gave before, unless somebody has unloaded the model since."""

        def how(rows: dict[str, bool]) -> None:
            if rows.get(model) and before is None:
                del rows[model]
            elif rows.get(model) and before is not None:
                rows[model] = before

        await self._table.change(how)

    def get(self, model: str) -> bool | None:
        """Whether the model was loaded (true) or unloaded (false) last; None: neither. Raises `OSError`."""
        return self._table.rows().get(model)

    def adjust(self, chosen: Iterable[str], served: Iterable[str]) -> list[str]:
        """Catalog ids to load at the start: the `chosen` ones that were not unloaded, and those that were loaded.

        None at all if the marks cannot be read.
        """
        names = set(chosen)
        try:
            marks = self._table.rows()
        except OSError as error:
            log.error("which models were loaded by name cannot be read: %s", error.strerror)
            return []
        return [entry for entry in served if marks.get(split_id(entry)[0], entry in names)]
