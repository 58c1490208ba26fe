"""Keeps the catalog of a running frontend in step with its files; workers follow the files by themselves.

A frontend knows a new model a second or two after its file has settled. A request for the model waits until a worker
knows the model too. A bad file leaves its model as before, or the model answers with the mistake; the log names file,
line and field.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.opening import open_catalog, tell_bad
from ipc.catalog.repository.overrides import Overrides
from ipc.catalog.repository.retaining import with_retained
from ipc.catalog.watch import EVERY_S, CatalogWatch
from ipc.errors import ConfigError, DeadlineExceeded
from ipc.settings import Settings
from ipc.store.store import Store

log = logging.getLogger(__name__)


class CatalogFollower:
    """Replaces the content of `catalog` when its files change."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        store: Store,
        is_loaded: Callable[[str, str], bool] = lambda name, revision: False,
    ) -> None:
        """`is_loaded` says whether some worker has a model, with files of that revision."""
        self._settings, self._catalog, self._is_loaded = settings, catalog, is_loaded
        self._wanted: Catalog | None = None
        """The catalog of the files, while this frontend serves more models than the files name."""
        self._turn = asyncio.Lock()
        """Held from reading the files until their catalog is served, so that no older reading replaces a newer one."""
        self.removed: set[tuple[str, int]] = set()
        """(model, version) pairs that left a repository during the life of this frontend; some may be back."""
        self._overrides = Overrides(settings.paths, store)
        places = settings.repository.dirs, self._overrides
        self._watch = CatalogWatch(settings.catalog.dirs, catalog.files, *places)

    async def run(self) -> None:
        """Look once a second, in a thread; for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self._follow()
            except ConfigError as error:
                log.error("the changed catalog is refused, the old one stays: %s", error.message)
            except Exception:
                # NOTE: this task lives as long as the process; files can be wrong in more ways than one foresees.
                log.exception("looking at the catalog's files failed")

    async def catch_up(self) -> None:
        """Serve what loads by name brought before this frontend began; what is wrong is only told in the log."""
        try:
            await self._sweep()
            if self._overrides.read():
                await self.reload()
        except ConfigError as error:
            log.error(
                "models that loads brought are not served, the accepted catalog stays: %s", error.message
            )
        except Exception:
            # NOTE: a frontend that does not start ends the whole server.
            log.exception("models that loads brought cannot be read")

    async def _sweep(self) -> None:
        try:
            # NOTE: whoever holds the lock sweeps as well.
            with contextlib.suppress(DeadlineExceeded):
                async with self._overrides.locked(deadline.after(0)):
                    await asyncio.to_thread(self._overrides.sweep)
        except OSError as error:
            log.error("files of ended loads cannot be deleted from the run directory: %s", error)

    async def reload(self, changed_only: bool = False) -> bool:
        """Read the files now; whether they say something else than before. Raises `ConfigError` when they are wrong.

        `changed_only`: not if they are as they were when they were read last.
        """
        async with self._turn:
            if changed_only and not await asyncio.to_thread(self._watch.differs):
                return False
            found = await asyncio.to_thread(self._open)
            # NOTE: not in the thread, which goes on when this task is cancelled: nobody would look at the files again.
            self._watch.was_read(found.files)
            changed = found.sources != (self._wanted or self._catalog).sources
            if changed:
                self._wanted = found
                self._serve()
        return changed

    def chosen(self, model: str) -> tuple[int, ...]:
        """The versions of a repository model that its files choose; more are served until one of them is loaded."""
        return (self._wanted or self._catalog).versions.get(model, ())

    async def _follow(self) -> None:
        async with self._turn:
            found = await asyncio.to_thread(self.look)
            self._wanted = self._wanted if found is None else found
            self._serve()

    def _serve(self) -> None:
        """Serve what the files say, and versions that stay until one of those can take their place."""
        if self._wanted is None:
            return
        catalog = with_retained(self._wanted, self._catalog.sources, self._is_loaded)
        if catalog.sources != self._catalog.sources:
            self.removed |= _versions(self._catalog) - _versions(catalog)
            self._catalog.replace(catalog)
        if catalog is self._wanted:
            self._wanted = None

    def look(self) -> Catalog | None:
        """The new catalog when the files have changed. Raises `ConfigError` when they are wrong, once per change."""
        if not self._watch.changed():
            return None
        found = self._open()
        self._watch.was_read(found.files)
        return found

    def _open(self) -> Catalog:
        chosen = self._settings
        found = open_catalog(chosen.catalog, chosen.repository, vanished_ok=True, overrides=self._overrides)
        tell_bad(found)
        return found.keeping((self._wanted or self._catalog).sources)


def _versions(catalog: Catalog) -> set[tuple[str, int]]:
    """(model, version) of all that repositories have."""
    found = (entry for entry in catalog.sources if isinstance(entry, RepositoryEntry) and not entry.absent)
    return {(entry.model, entry.version) for entry in found}
