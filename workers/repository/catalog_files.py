"""The catalog that the settings name, catalog files and repositories together: opened, watched, and kept by workers.

A first start wants a catalog without mistakes. A worker that starts again while the server runs must not stay away
because a file was broken or taken away meanwhile: the worker serves what is left, or the catalog accepted last.

A worker that runs notices changes of the files (`CatalogWatch`) by one look a second:

1. A look is the set of all `*.yaml` files below the catalog's directories, of the Python files (adapters) among them,
   of all files and directories of the model repositories, with their size and time, and of what loads by name brought
   (`ipc.store.wishes`).
2. A look that differs from the one before only starts the waiting, since an editor may still be writing. What a load
   brought is in place at once.
3. Two equal looks that differ from the last reading mean that the catalog is to be read again.

NOTE: nothing here imports torch, so that a wrong configuration is told at once, and so that `workers.main` sets what
torch reads from the environment before torch is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from ipc.catalog.entries import Catalog, DirectorySource, Files, ModelEntry
from ipc.catalog.reading import check_lists, check_lora_dirs, files_below, read_served
from ipc.catalog.repository import names_of, refuse_clash
from ipc.decoding import learnt
from ipc.errors import ConfigError
from ipc.processes.paths import asset
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository, Settings
from ipc.store.store import Store
from ipc.store.wishes import Wishes
from workers.repository import entries, layout
from workers.repository.entries import RepositoryEntry

log = logging.getLogger(__name__)

NONE = Repository()
EVERY_S = 1.0
_BROUGHT = "brought "


def open_catalog(
    chosen: CatalogSettings,
    repository: Repository,
    vanished_ok: bool = False,
    wishes: Wishes | None = None,
    added: Collection[str] = (),
) -> Catalog:
    """The catalog of all that may be served, also of the directories `added`.

    Raises `ConfigError` as `read_catalog` and `add_repositories` do.
    """
    files = look(chosen.dirs, repository.dirs, wishes, added)
    served = read_served(chosen, repository, vanished_ok, added)
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
    """The catalog of `served`, and all models of the repositories.

    Raises `ConfigError` for a repository that cannot be read and for a name that two models would have; a model that a
    load brought is left out then.
    """
    taken = names_of(served.sources)
    versions = entries.read(repository, wishes, taken)
    refuse_clash((entry.model for entry in versions), taken)
    return Catalog([*_with_loras(served.sources, wishes), *versions], files, served.reading, served.read_ns)


def _with_loras(sources: Iterable[ModelEntry], wishes: Wishes | None) -> Iterable[ModelEntry]:
    """The entries with the LoRA adapters that were loaded by name; an adapter of the entry's own goes first."""
    rows = wishes.loras() if wishes is not None else {}
    for entry in sources:
        brought = {name: DirectorySource(lora.path) for name, lora in rows.items() if lora.model == entry.id}
        yield msgspec.structs.replace(entry, loras=brought | entry.loras) if brought else entry


class _Accepted(msgspec.Struct):
    """An accepted catalog: the settings that chose it, as JSON, and its entries before profiles are drawn apart."""

    chosen: str
    entries: list[ModelEntry]


def open_for(settings: Settings) -> Catalog:
    """The catalog of a worker that starts with these settings; raises as `open_accepted` does."""
    paths = settings.paths
    wishes = Wishes(paths, Store(paths))
    return open_accepted(paths.root, settings.catalog, settings.repository, wishes, settings.configured_dirs)


def open_accepted(
    root: Path,
    chosen: CatalogSettings,
    repository: Repository = NONE,
    wishes: Wishes | None = None,
    added: Collection[str] = (),
) -> Catalog:
    """The catalog of a worker that starts; `root` is the run directory. See `open_catalog` for the others.

    Raises `ConfigError` for any mistake, unless a catalog was accepted here before with the same settings.
    """
    accepted = _read(root, chosen)
    if accepted is None:
        catalog = open_catalog(chosen, repository, wishes=wishes, added=added)
        tell_bad(catalog)
        _check(catalog, chosen)
    else:
        catalog = _reopen(accepted, chosen, repository, wishes, added)
    keep(root, chosen, catalog)
    return catalog


def _reopen(
    accepted: Catalog,
    chosen: CatalogSettings,
    repository: Repository,
    wishes: Wishes | None,
    added: Collection[str],
) -> Catalog:
    try:
        catalog = open_catalog(chosen, repository, vanished_ok=True, wishes=wishes, added=added)
    except (ConfigError, OSError) as error:
        log.error("the catalog is refused, the one accepted last stays: %s", error)
        return _with_repositories(accepted, repository, wishes)
    tell_bad(catalog)
    catalog = catalog.keeping(accepted.sources)
    try:
        _check(catalog, chosen)
    except ConfigError as error:
        log.warning("%s", error.message)
    return catalog


def _with_repositories(accepted: Catalog, repository: Repository, wishes: Wishes | None) -> Catalog:
    """The accepted catalog, which has catalog files only, and the present models of the repositories."""
    try:
        return add_repositories(accepted, repository, accepted.files, wishes)
    except ConfigError as error:
        log.error("models of repositories are not served: %s", error.message)
        # NOTE: older than all other readings, so that frontends go on with the models that other workers know.
        accepted.read_ns = 1
        return accepted


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
        text = msgspec.json.encode(_Accepted(_settings(chosen), entries))
        if path.exists() and path.read_bytes() == text:
            return
        draft.write_bytes(text)
        draft.replace(path)
    except OSError as error:
        log.warning("the accepted catalog is not kept: %s", error)
        draft.unlink(missing_ok=True)


def _read(root: Path, chosen: CatalogSettings) -> Catalog | None:
    try:
        accepted = msgspec.json.decode(_path(root).read_bytes(), type=learnt(_Accepted))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("the kept catalog cannot be read: %s", error)
        return None
    return Catalog(accepted.entries) if accepted.chosen == _settings(chosen) else None


def _settings(chosen: CatalogSettings) -> str:
    return msgspec.json.encode(chosen, order="deterministic").decode()


def _path(root: Path) -> Path:
    return root / "catalog.json"


def look(
    dirs: Iterable[str],
    repositories: Iterable[str] = (),
    wishes: Wishes | None = None,
    added: Iterable[str] = (),
) -> Files:
    """(path, size, time in nanoseconds, inode) of every file that decides on models; a vanishing file is left out.

    Directories of repositories are there too, with zeros. What a load brought is a path that no file has.
    """
    roots = [*([Path(d) for d in dirs] or [asset("config/models")]), *map(Path, added)]
    paths = (path for root in roots for path in files_below(root, (".yaml", ".py")))
    catalog = frozenset(facts for path in paths if (facts := _facts(path)))
    brought = wishes.brought() if wishes is not None else {}
    wished = ((f"{_BROUGHT}{model} {wish.digest}", 0, 0, 0) for model, wish in brought.items())
    rows = wishes.loras() if wishes is not None else {}
    loras = ((f"{_BROUGHT}{lora.model} {name} {lora.path}", 0, 0, 0) for name, lora in rows.items())
    return catalog.union(wished, loras, *(layout.look(Path(root)) for root in repositories))


def _facts(path: Path) -> tuple[str, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_size, status.st_mtime_ns, status.st_ino


class CatalogWatch:
    """Looks at the files of one catalog; `read` is the look of the last reading of the catalog."""

    def __init__(
        self,
        dirs: Iterable[str],
        read: Files | None = None,
        repositories: Iterable[str] = (),
        wishes: Wishes | None = None,
        added: Iterable[str] = (),
    ) -> None:
        self._places = tuple(dirs), tuple(repositories), wishes, tuple(added)
        self._read = self._last = look(*self._places) if read is None else read

    def changed(self) -> bool:
        """Whether the files differ from those read last and have settled; says so once for each change."""
        now = look(*self._places)
        # A wish is put in force in one step, so a difference by wishes alone has settled.
        before, self._last = self._last, now
        settled = all(path.startswith(_BROUGHT) for path, *_ in now ^ before)
        if not settled or now == self._read:
            return False
        self._read = now
        return True

    def differs(self) -> bool:
        """Whether the files differ from those read last, settled or not."""
        return look(*self._places) != self._read

    def was_read(self, files: Files) -> None:
        """The catalog has been read since, from these files, which may differ from those of the last look.

        Without this, a change that was read between two looks and taken back before the second would not be noticed.
        """
        self._read = files
