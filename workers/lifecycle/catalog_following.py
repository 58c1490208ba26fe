"""The catalog of a worker, followed while the worker runs.

1. Once a second `CatalogFollower` asks whether files or loads by name changed. A catalog with mistakes is refused, and
   the catalog in force stays.
2. A frontend that is to load a model by name has the files read at once (`reread`), settled or not.
3. `ToldEntries` says which entries frontends have still to be told of.
4. A version of a repository model whose place another version takes stays until the other version is loaded.
"""

from __future__ import annotations

import logging
import math
import time

from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.repository import VersionEntry, with_retained
from ipc.errors import ConfigError, InvalidInput
from ipc.settings import Settings
from ipc.wire.catalogs import Entries, Reread
from workers.lifecycle import model_states
from workers.lifecycle.model_states import ModelStates
from workers.repository import catalog_files
from workers.repository.catalog_files import CatalogWatch
from workers.repository.entries import RepositoryEntry, refuse_draft

log = logging.getLogger(__name__)

RETIRE_AFTER_S = 3.0
"""How long a version stays after its successor is loaded; by then no frontend sends requests for the version."""


class CatalogFollower:
    """Keeps the models of a worker to the files of the catalog; `look` belongs to the maintenance thread."""

    def __init__(self, states: ModelStates, settings: Settings, catalog: Catalog) -> None:
        """`catalog` is the catalog that is served now."""
        self._states, self._settings = states, settings
        self.catalog = catalog
        """The content of the files at the last reading. More is served while old versions stay."""
        self._follows = settings.catalog.watch
        self._watch = CatalogWatch(
            settings.catalog.dirs,
            catalog.files,
            settings.repository.dirs,
            states.wishes,
            settings.configured_dirs,
        )
        self._coming: Catalog | None = None
        """The catalog of the files, while more than this catalog is served."""
        self._replaced_at = math.inf

    def look(self) -> None:
        """Serve the content of the files once they have changed. No mistake in the files ends the worker."""
        try:
            with self._states.lock:
                self._states.follow_unloads()
            if self._follows and self._watch.changed():
                self._follow()
            else:
                self._retire_retained()
        except ConfigError as error:
            log.error("the changed catalog is refused, the old one stays: %s", error.message)
        except (OSError, ValueError, RecursionError) as error:
            log.error("the catalog's files cannot be followed, the old catalog stays: %s", error)

    def reread(self, message: Reread) -> bool:
        """Look now, on behalf of a frontend: at the files, settled or not, or only at the draft of a load.

        Returns whether the files say something else than before. Raises `InvalidInput` for files or a draft that cannot
        be served, and `ModelLoadFailed` as `refuse_draft` does.
        """
        try:
            if message.draft is not None:
                refuse_draft(self._settings.repository, self._states.wishes, message.model, message.draft)
                return False
            return self._watch.differs() and self._follow()
        except (ConfigError, OSError, ValueError, RecursionError) as error:
            log.error("the changed catalog is refused, the old one stays: %s", error)
            raise InvalidInput("the model files have mistakes; the server's log names them") from error

    def _follow(self) -> bool:
        """Serve the present content of the files. Raises `ConfigError`, and the errors of reading files."""
        chosen = self._settings.catalog
        catalog = catalog_files.open_catalog(
            chosen,
            self._settings.repository,
            vanished_ok=True,
            wishes=self._states.wishes,
            added=self._settings.configured_dirs,
        )
        catalog_files.tell_bad(catalog)
        catalog = catalog.keeping(self.catalog.sources)
        model_states.groups(catalog)
        self._watch.was_read(catalog.files)
        changed = catalog.sources != self.catalog.sources
        log.info("the catalog changed: it has %d models now", len(catalog))
        catalog_files.keep(self._settings.paths.root, chosen, catalog)
        self.catalog, self._coming, self._replaced_at = catalog, catalog, math.inf
        self.apply(self._with_retained(catalog))
        return changed

    def _with_retained(self, catalog: Catalog) -> Catalog:
        """`catalog`, and the served versions that stay until a version in `catalog` can take their place."""
        served = dict(self._states.served)

        def is_loaded(name: str, revision: str) -> bool:
            model = served.get(name)
            return model is not None and model.adapter is not None and revision in ("", model.entry.code)

        return with_retained(catalog, (model.entry for model in served.values()), is_loaded)

    def _retire_retained(self) -> None:
        """Unload versions whose successors have been loaded for `RETIRE_AFTER_S`."""
        if self._coming is None:
            return
        catalog, now = self._with_retained(self._coming), time.monotonic()
        if self._states.served.keys() - catalog.keys():
            self._replaced_at = min(self._replaced_at, now)
            if now - self._replaced_at < RETIRE_AFTER_S:
                return
            self.apply(catalog)
        self._replaced_at = math.inf
        if catalog is self._coming:
            self._coming = None

    def apply(self, catalog: Catalog) -> None:
        """Serve this catalog: new models become available, removed and changed ones are unloaded.

        Models of the start are loaded at once if they changed, or are new in a repository. So are replacements of
        models that still serve, and models with a mistake, whose load tells the mistake. Others wait for a request.
        """
        with self._states.lock:
            known = set(self._states.instances())
            replaced = self._states.serve(catalog)
            new = (
                i
                for i in self._states.instances()
                if i not in known and (isinstance(i.entry, RepositoryEntry) or i.entry.error)
            )
            for instance in dict.fromkeys([*replaced, *new]):
                is_due = (
                    self._states.is_preloaded(instance)
                    or self._states.replaced_by(instance)
                    or instance.entry.error
                )
                if instance.state == "available" and is_due:
                    self._states.enqueue(instance, demanded=False)
            self._states.announce()


class ToldEntries:
    """The entries of this worker's catalog as its frontends know them. Endpoint thread only."""

    def __init__(self) -> None:
        self._catalog = Catalog(())
        self._told: dict[str, ModelEntry] = {}

    def changes(self, catalog: Catalog) -> Entries | None:
        """The message that tells a catalog; None if the catalog is that of the last call."""
        if catalog is self._catalog:
            return None
        before, self._catalog = self._told, catalog
        entries = (e.told() if isinstance(e, RepositoryEntry) else e for e in catalog.sources)
        self._told = {entry.id: entry for entry in entries}
        return self._message([entry for entry in self._told.values() if before.get(entry.id) != entry])

    def all(self) -> Entries:
        """All entries of the catalog of the last call of `changes`."""
        return self._message(list(self._told.values()))

    def _message(self, changed: list[ModelEntry]) -> Entries:
        return Entries(
            self._catalog.read_ns,
            list(self._told),
            [entry for entry in changed if not isinstance(entry, VersionEntry)],
            [entry for entry in changed if isinstance(entry, VersionEntry)],
            sorted(self._catalog.names),
        )
