"""Keeps the catalog of a running frontend as its files say; workers do the same by themselves.

A new model is known here a second or two after its file has settled, and a request for it waits until a worker knows it
too. A broken file changes nothing and is told in the log, with file and field.
"""

from __future__ import annotations

import asyncio
import logging

from ipc.catalog import Catalog, load_catalog
from ipc.catalog_watch import EVERY_S, CatalogWatch
from ipc.errors import ConfigError
from ipc.settings import Settings

log = logging.getLogger(__name__)


class CatalogFollower:
    """Replaces the content of `catalog` when its files change."""

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self._chosen, self._catalog = settings.catalog, catalog
        self._watch = CatalogWatch(settings.catalog.dirs, catalog.files)

    async def run(self) -> None:
        """Look once a second, in a thread; for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                found = await asyncio.to_thread(self.look)
            except ConfigError as error:
                log.error("the changed catalog is refused, the old one stays: %s", error.message)
            except Exception:
                # NOTE: this task lives as long as the process; files can be wrong in more ways than one foresees.
                log.exception("looking at the catalog's files failed")
            else:
                if found is not None:
                    self._catalog.replace(found)

    def look(self) -> Catalog | None:
        """The new catalog when the files have changed. Raises `ConfigError` when they are wrong, once per change."""
        if not self._watch.changed():
            return None
        chosen = self._chosen
        return load_catalog(chosen.dirs, chosen.models, chosen.serve_all, vanished_ok=True)
