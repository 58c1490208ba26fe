"""The catalog that the settings name, catalog files and repositories together, and what a worker keeps of it.

A first start wants a catalog without mistakes. A worker that starts again while the server runs must not stay away
because a file was broken or taken away meanwhile: it serves what is left, or what was accepted last.

NOTE: nothing here imports torch, so that a wrong configuration is told at once, and so that `workers.main` sets what
torch reads from the environment before torch is imported.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from ipc.catalog.entries import Catalog, Files, ModelEntry, check_lists, check_lora_dirs, load_served
from ipc.catalog.repository import names_of, refuse_clash
from ipc.errors import ConfigError
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository, Settings
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from workers.repository import entries
from workers.repository.entries import RepositoryEntry
from workers.repository.watch import look

log = logging.getLogger(__name__)


def open_catalog(
    chosen: CatalogSettings,
    repository: Repository,
    vanished_ok: bool = False,
    wishes: Wishes | None = None,
) -> Catalog:
    """Everything that may be served. Raises `ConfigError` as `load_catalog` does, and as `add_repositories` does."""
    files = look(chosen.dirs, repository.dirs, wishes)
    served = load_served(chosen, repository, vanished_ok)
    return add_repositories(served, repository, files, wishes)


def tell_bad(catalog: Catalog) -> None:
    """Name the bad files of a catalog that is about to be served in the log."""
    for file in catalog.reading.bad:
        without = (
            "" if file.entry is None else f": model {file.entry.id} cannot be loaded, or stays as it was"
        )
        log.error("bad catalog file%s: %s", without, file.message)


def add_repositories(
    served: Catalog,
    repository: Repository,
    files: Files,
    wishes: Wishes | None = None,
) -> Catalog:
    """What is served, and all models of the repositories.

    Raises `ConfigError` for a repository that cannot be read and for a name that two models would have; a model that a
    load brought is left out then.
    """
    taken = names_of(served.sources)
    found = entries.read(repository, wishes, taken)
    refuse_clash((entry.model for entry in found), taken)
    return Catalog([*served.sources, *found], files, served.reading, served.read_ns)


log = logging.getLogger(__name__)

NONE = Repository()


class _Kept(msgspec.Struct):
    """What was accepted: the settings that chose it, as JSON, and the entries before their profiles are drawn apart."""

    chosen: str
    entries: list[ModelEntry]


def open_for(settings: Settings) -> Catalog:
    """The catalog of a worker that starts with these settings; raises as `open_accepted` does."""
    paths = settings.paths
    wishes = Wishes(paths, Store(paths))
    return open_accepted(paths.root, settings.catalog, settings.repository, wishes)


def open_accepted(
    root: Path,
    chosen: CatalogSettings,
    repository: Repository = NONE,
    wishes: Wishes | None = None,
) -> Catalog:
    """The catalog of a worker that starts; `root` is the run directory.

    Raises `ConfigError` for any mistake, unless a catalog was accepted here before with the same settings.
    """
    kept = _read(root, chosen)
    if kept is None:
        catalog = open_catalog(chosen, repository, wishes=wishes)
        tell_bad(catalog)
        _check(catalog, chosen)
    else:
        catalog = _reopen(kept, chosen, repository, wishes)
    keep(root, chosen, catalog)
    return catalog


def _reopen(kept: Catalog, chosen: CatalogSettings, repository: Repository, wishes: Wishes | None) -> Catalog:
    try:
        catalog = open_catalog(chosen, repository, vanished_ok=True, wishes=wishes)
    except (ConfigError, OSError) as error:
        log.error("the catalog is refused, the one accepted last stays: %s", error)
        return _with_repositories(kept, repository, wishes)
    tell_bad(catalog)
    catalog = catalog.keeping(kept.sources)
    try:
        _check(catalog, chosen)
    except ConfigError as error:
        log.warning("%s", error.message)
    return catalog


def _with_repositories(kept: Catalog, repository: Repository, wishes: Wishes | None) -> Catalog:
    """What was kept, which are catalog files only, and the models of the repositories as they are now."""
    try:
        return add_repositories(kept, repository, kept.files, wishes)
    except ConfigError as error:
        log.error("models of repositories are not served: %s", error.message)
        # NOTE: older than all other readings, so that frontends go on with the models that other workers know.
        kept.read_ns = 1
        return kept


def _check(catalog: Catalog, chosen: CatalogSettings) -> None:
    check_lists(catalog, chosen.preload, chosen.pinned)
    check_lora_dirs(chosen.lora_dirs)


def keep(root: Path, chosen: CatalogSettings, catalog: Catalog) -> None:
    """Remember an accepted catalog, in one step; without room for the file the worker serves all the same.

    Workers share the file: a worker leaves the file alone if another worker has written the same.
    """
    path = _path(root)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        entries = [entry for entry in catalog.sources if not isinstance(entry, RepositoryEntry)]
        text = msgspec.json.encode(_Kept(_settings(chosen), entries))
        if path.exists() and path.read_bytes() == text:
            return
        draft.write_bytes(text)
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
