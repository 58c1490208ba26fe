"""The catalog of a running frontend, as workers tell it; a frontend reads no files of models.

1. A frontend begins with the catalog's files as the arbiter has read them, and knows no model of a repository yet.
2. Each worker tells the entries of its catalog and when it read them. The newest reading is served.
3. A version of a repository model whose place another version takes is served until the other one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.repository import VersionEntry, with_retained
from ipc.wire.catalogs import Entries


class ToldCatalog(NamedTuple):
    """What one worker has told: entries by id, instant of the reading, and ids of all entries in files."""

    entries: Mapping[str, ModelEntry] = {}
    read_ns: int = 0
    names: frozenset[str] = frozenset()

    def after(self, message: Entries) -> ToldCatalog:
        """The catalog once this message is taken in."""
        changed: dict[str, ModelEntry] = {entry.id: entry for entry in (*message.models, *message.versions)}
        known = self.entries | changed  # type: ignore[operator]
        entries = {name: known[name] for name in message.ids if name in known}
        return ToldCatalog(entries, message.read_ns, frozenset(message.names))


class CatalogFollower:
    """Replaces the content of `catalog` when a worker tells something newer, or has loaded what takes a place."""

    def __init__(
        self,
        catalog: Catalog,
        told: Callable[[], Iterable[ToldCatalog]],
        is_loaded: Callable[[str, str], bool],
    ) -> None:
        """`is_loaded` tells whether some worker has a model, with files of that revision."""
        self._catalog, self._told, self._is_loaded = catalog, told, is_loaded
        self._first, self._first_ns = catalog.sources, catalog.read_ns
        self._coming: Catalog | None = None
        """The catalog of the newest reading, while more than this catalog is served."""
        self.read_ns = 0
        """Instant of the newest reading that a worker has told; 0 before there is one."""
        self.removed: set[tuple[str, int]] = set()
        """(model, version) of what was in a repository while this frontend ran; some may be there again."""

    def follow(self) -> None:
        """Workers have told something, or their states are others."""
        newest = max(self._told(), key=lambda told: told.read_ns, default=ToldCatalog())
        if newest.read_ns > self.read_ns:
            self.read_ns = newest.read_ns
            self._coming = self._catalog_of(newest)
        if self._coming is None:
            return
        catalog = with_retained(self._coming, self._catalog.sources, self._is_loaded)
        if catalog.sources != self._catalog.sources:
            self.removed |= _versions(self._catalog) - _versions(catalog)
            self._catalog.replace(catalog)
        if catalog is self._coming:
            self._coming = None

    def chosen(self, model: str) -> tuple[int, ...]:
        """The versions of a repository model that its files choose; more are served until one of them is loaded."""
        return (self._coming or self._catalog).versions.get(model, ())

    def _catalog_of(self, told: ToldCatalog) -> Catalog:
        """What a worker serves. Of the catalog's files, the arbiter may have a newer reading, from a reload."""
        versions = [entry for entry in told.entries.values() if isinstance(entry, VersionEntry)]
        if told.read_ns > self._first_ns:
            models = [entry for entry in told.entries.values() if not isinstance(entry, VersionEntry)]
            return Catalog([*models, *versions], read_ns=told.read_ns, names=told.names)
        return Catalog([*self._first, *versions], read_ns=self._first_ns, names=self._catalog.names)


def _versions(catalog: Catalog) -> set[tuple[str, int]]:
    """(model, version) of all that repositories have."""
    versions = (entry for entry in catalog.sources if isinstance(entry, VersionEntry) and entry.is_version)
    return {(entry.model, entry.version) for entry in versions}
