"""The catalog of a worker: opened at its start, followed while it runs, and kept for workers that start anew.

1. A first start wants a catalog without mistakes. A worker that starts again while the server runs must not stay away
   because a file was broken or taken away meanwhile: it serves what is left, or what was accepted last.
2. Once a second `CatalogFollower` asks whether files changed. A catalog with mistakes is refused, and the one in force
   stays.
3. A version of a repository model whose place another version takes stays until the other one is loaded.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import msgspec

from ipc.catalog.entries import Catalog, ModelEntry, check_lists, check_lora_dirs
from ipc.catalog.repository import opening
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.overrides import Overrides
from ipc.catalog.repository.retaining import with_retained
from ipc.catalog.watch import CatalogWatch
from ipc.errors import ConfigError
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository, Settings
from ipc.store.store import Store
from workers.lifecycle import grouping
from workers.lifecycle.model_states import ModelStates

log = logging.getLogger(__name__)

NONE = Repository()
RETIRE_AFTER_S = 3.0
"""How long a version stays whose place was taken: until then frontends have ceased to send requests for it."""


class _Kept(msgspec.Struct):
    """What was accepted: the settings that chose it, as JSON, and the entries before their profiles are drawn apart."""

    chosen: str
    entries: list[ModelEntry]


def open_for(settings: Settings) -> Catalog:
    """The catalog of a worker that starts with these settings; raises as `open_catalog` does."""
    paths = settings.paths
    overrides = Overrides(paths, Store(paths))
    return open_catalog(paths.root, settings.catalog, settings.repository, overrides)


def open_catalog(
    root: Path,
    chosen: CatalogSettings,
    repository: Repository = NONE,
    overrides: Overrides | None = None,
) -> Catalog:
    """The catalog of a worker that starts; `root` is the run directory.

    Raises `ConfigError` for any mistake, unless a catalog was accepted here before with the same settings.
    """
    kept = _read(root, chosen)
    if kept is None:
        catalog = opening.open_catalog(chosen, repository, overrides=overrides)
        opening.tell_bad(catalog)
        _check(catalog, chosen)
    else:
        catalog = _reopen(kept, chosen, repository, overrides)
    keep(root, chosen, catalog)
    return catalog


def _reopen(
    kept: Catalog, chosen: CatalogSettings, repository: Repository, overrides: Overrides | None
) -> Catalog:
    try:
        catalog = opening.open_catalog(chosen, repository, vanished_ok=True, overrides=overrides)
    except (ConfigError, OSError) as error:
        log.error("the catalog is refused, the one accepted last stays: %s", error)
        return _with_repositories(kept, repository, overrides)
    opening.tell_bad(catalog)
    catalog = catalog.keeping(kept.sources)
    try:
        _check(catalog, chosen)
    except ConfigError as error:
        log.warning("%s", error.message)
    return catalog


def _with_repositories(kept: Catalog, repository: Repository, overrides: Overrides | None) -> Catalog:
    """What was kept, which are catalog files only, and the models of the repositories as they are now."""
    try:
        return opening.add_repositories(kept.sources, repository, kept.files, overrides)
    except ConfigError as error:
        log.error("models of repositories are not served: %s", error.message)
        return kept


def _check(catalog: Catalog, chosen: CatalogSettings) -> None:
    check_lists(catalog, chosen.preload, chosen.pinned)
    check_lora_dirs(chosen.lora_dirs)


def keep(root: Path, chosen: CatalogSettings, catalog: Catalog) -> None:
    """Remember an accepted catalog, in one step; without room for it the worker serves all the same."""
    path = _path(root)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        entries = [entry for entry in catalog.sources if not isinstance(entry, RepositoryEntry)]
        draft.write_bytes(msgspec.json.encode(_Kept(_settings(chosen), entries)))
        draft.replace(path)
    except OSError as error:
        log.warning("the accepted catalog is not kept: %s", error)
        draft.unlink(missing_ok=True)


def _read(root: Path, chosen: CatalogSettings) -> Catalog | None:
    try:
        kept = msgspec.json.decode(_path(root).read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("the kept catalog cannot be read: %s", error)
        return None
    return Catalog(kept.entries) if kept.chosen == _settings(chosen) else None


def _settings(chosen: CatalogSettings) -> str:
    return msgspec.json.encode(chosen, order="deterministic").decode()


def _path(root: Path) -> Path:
    return root / "catalog.json"


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
        keep(self._settings.paths.root, chosen, catalog)
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
