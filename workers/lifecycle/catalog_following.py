"""The catalog of a worker, followed while the worker runs.

1. Once a second `CatalogFollower` asks whether files changed. A catalog with mistakes is refused, and the one in force
   stays.
2. A version of a repository model whose place another version takes stays until the other one is loaded.
"""

from __future__ import annotations

import logging
import math
import time

from ipc.catalog.entries import Catalog
from ipc.catalog.repository import opening
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.overrides import Overrides
from ipc.catalog.repository.retaining import with_retained
from ipc.catalog.watch import CatalogWatch
from ipc.errors import ConfigError
from ipc.settings import Settings
from ipc.store.store import Store
from workers.lifecycle import catalog_opening, grouping
from workers.lifecycle.model_states import ModelStates

log = logging.getLogger(__name__)

RETIRE_AFTER_S = 3.0
"""How long a version stays whose place was taken: until then frontends have ceased to send requests for it."""


class CatalogFollower:
    """Keeps the models of a worker to what the files of the catalog say; `look` belongs to the maintenance thread."""

    def __init__(self, states: ModelStates, settings: Settings, catalog: Catalog) -> None:
        """`catalog` is what is served now."""
        self._states, self._settings = states, settings
        self._overrides = Overrides(settings.paths, Store(settings.paths))
        places = (settings.catalog.dirs, catalog.files, settings.repository.dirs, self._overrides)
        self._sources = catalog.sources
        self._watch = CatalogWatch(*places) if settings.catalog.watch else None
        self._wanted: Catalog | None = None
        """The catalog of the files, while more than that is served."""
        self._replaced_at = math.inf

    def look(self) -> None:
        """Serve what the files say once they have changed. Whatever is wrong with them must not end the worker."""
        if self._watch is None:
            return
        chosen = self._settings.catalog
        try:
            if not self._watch.changed():
                self._retire_retained()
                return
            catalog = opening.open_catalog(
                chosen, self._settings.repository, vanished_ok=True, overrides=self._overrides
            )
            opening.tell_bad(catalog)
            catalog = catalog.keeping(self._sources)
            grouping.groups(catalog)
        except ConfigError as error:
            log.error("the changed catalog is refused, the old one stays: %s", error.message)
            return
        except (OSError, ValueError, RecursionError) as error:
            log.error("the catalog's files cannot be followed, the old catalog stays: %s", error)
            return
        self._watch.was_read(catalog.files)
        self._sources = catalog.sources
        log.info("the catalog changed: it has %d models now", len(catalog))
        catalog_opening.keep(self._settings.paths.root, chosen, catalog)
        self._wanted, self._replaced_at = catalog, math.inf
        self.apply(self._with_retained(catalog))

    def _with_retained(self, catalog: Catalog) -> Catalog:
        """`catalog`, and versions that stay until one of those that it names can take their place."""
        served = dict(self._states.served)

        def is_loaded(name: str, revision: str) -> bool:
            model = served.get(name)
            return model is not None and model.adapter is not None and revision in ("", model.entry.code)

        return with_retained(catalog, (model.entry for model in served.values()), is_loaded)

    def _retire_retained(self) -> None:
        """Unload versions whose place has been taken, a while ago."""
        if self._wanted is None:
            return
        catalog, now = self._with_retained(self._wanted), time.monotonic()
        if self._states.served.keys() - catalog.keys():
            self._replaced_at = min(self._replaced_at, now)
            if now - self._replaced_at < RETIRE_AFTER_S:
                return
            self.apply(catalog)
        self._replaced_at = math.inf
        if catalog is self._wanted:
            self._wanted = None

    def apply(self, catalog: Catalog) -> None:
        """Serve this catalog: new models become available, removed and changed ones are unloaded.

        A changed model that is loaded at the start is loaded again at once, any other when somebody asks; so is a new
        one of a repository, and what is to replace one that still serves.
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
                wanted = (
                    self._states.is_preloaded(instance)
                    or self._states.replaced_by(instance)
                    or instance.entry.error
                )
                if instance.state == "available" and wanted:
                    self._states.enqueue(instance, demanded=False)
            self._states.announce()
