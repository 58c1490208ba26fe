"""Versions that go on being served until a newer one can take their place.

A version that the policy no longer chooses, or whose directory is gone, stays while none of the chosen versions of its
model is loaded as its files are now. So a new version is loaded beside the old one, and one that cannot be loaded
replaces nothing. Workers and frontends decide alike, each by what it knows to be loaded. A changed version is not the
business of this module: it has the id of the old one, and workers alone decide which of the two serves (`Shelf.take`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ipc.catalog.entries import Catalog, ModelEntry
from ipc.catalog.repository.entries import RepositoryEntry
from ipc.catalog.repository.layout import id_of


def with_retained(
    new: Catalog, served: Iterable[ModelEntry], is_loaded: Callable[[str, str], bool]
) -> Catalog:
    """`new`, and those of `served` that stay for now; `new` itself when nothing does.

    `is_loaded` tells whether an entry is loaded, by id and `code`; an empty code stands for any.
    """

    def is_there(name: str) -> bool:
        return is_loaded(name, new[name].code)

    kept = [
        entry
        for entry in served
        if isinstance(entry, RepositoryEntry)
        and entry.id not in new
        and is_loaded(entry.id, "")
        and entry.model in new.versions
        and not any(is_there(id_of(entry.model, version)) for version in new.versions[entry.model])
    ]
    return Catalog([*new.sources, *kept], new.files, new.reading) if kept else new
