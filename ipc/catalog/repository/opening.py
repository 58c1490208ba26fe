"""The catalog that the settings name: catalog files and repositories together.

With a repository the shipped catalog is left out unless the section `catalog` asks for it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from ipc.catalog.entries import Catalog, ModelEntry, Reading, load_catalog
from ipc.catalog.repository import entries
from ipc.catalog.repository.overrides import Overrides
from ipc.catalog.watch import Files, look
from ipc.errors import ConfigError
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository

log = logging.getLogger(__name__)


def open_catalog(
    chosen: CatalogSettings,
    repository: Repository,
    vanished_ok: bool = False,
    overrides: Overrides | None = None,
) -> Catalog:
    """Everything that may be served. Raises `ConfigError` as `load_catalog` does, and as `add_repositories` does."""
    files = look(chosen.dirs, repository.dirs, overrides)
    if repository.dirs and not (chosen.dirs or any(chosen.models) or chosen.serve_all):
        return add_repositories((), repository, files, overrides)
    served = load_catalog(chosen.dirs, chosen.models, chosen.serve_all, vanished_ok)
    return add_repositories(served.sources, repository, files, overrides, served.reading)


def tell_bad(catalog: Catalog) -> None:
    """Name the bad files of a catalog that is about to be served in the log."""
    for file in catalog.reading.bad:
        without = (
            "" if file.entry is None else f": model {file.entry.id} cannot be loaded, or stays as it was"
        )
        log.error("bad catalog file%s: %s", without, file.message)


def check_models(catalog: Catalog, repository: Repository) -> None:
    """Raise `ConfigError` for a name in `repository.models` that no model has."""
    unknown = next((name for name in repository.models if name not in catalog.versions), None)
    if unknown is not None:
        close = difflib.get_close_matches(unknown, catalog.versions, n=1)
        raise ConfigError(
            f"repository.models: unknown model {unknown!r}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )


def add_repositories(
    served: Iterable[ModelEntry],
    repository: Repository,
    files: Files,
    overrides: Overrides | None = None,
    reading: Reading | None = None,
) -> Catalog:
    """A catalog of these entries and of all models of the repositories.

    Raises `ConfigError` for a repository that cannot be read and for a name that two models would have; a model that a
    load brought is left out then.
    """
    served = list(served)
    taken = {name: entry.id for entry in served for name in (entry.id.rpartition("/")[2], entry.id)}
    found = entries.read(repository, overrides, taken)
    clash = next((entry.model for entry in found if entry.model in taken), None)
    if clash is not None:
        raise ConfigError(
            f"repository.dirs: model {clash!r} has a name of the catalog model {taken[clash]!r}"
        )
    return Catalog([*served, *found], files, reading)
