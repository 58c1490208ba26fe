"""The catalog of a frontend: the newest reading that a worker tells is served, and old versions stay for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frontend.engine.local.catalog_following import CatalogFollower, ToldCatalog
from ipc.catalog.entries import AdapterSource, Catalog, DirectorySource, ModelEntry
from ipc.catalog.ids import NO_VERSION, id_of
from ipc.catalog.model_config import ModelConfig
from ipc.catalog.reading import read_served
from ipc.catalog.repository import VersionEntry
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository
from ipc.wire import codec
from ipc.wire.catalogs import Entries
from workers.lifecycle.catalog_following import ToldEntries
from workers.repository import catalog_files
from workers.repository.entries import RepositoryEntry

OLD, NEW = (ModelEntry(f"org/{name}", DirectorySource("/w")) for name in ("old", "new"))


def version(number: int, code: str = "", **more: Any) -> VersionEntry:
    """A version of the model `m`."""
    return VersionEntry(
        id=id_of("m", number),
        source=AdapterSource(),
        model="m",
        version=number,
        config=ModelConfig("m"),
        code=code,
        **more,
    )


class World:
    """A frontend that began with one model, whose workers have told what a test sets."""

    def __init__(self, read_ns: int = 10) -> None:
        self.catalog = Catalog([OLD], read_ns=read_ns, names=["org/old"])
        self.told: list[ToldCatalog] = []
        self.loaded = set[tuple[str, str]]()
        self.follower = CatalogFollower(self.catalog, lambda: self.told, self._is_loaded)

    def _is_loaded(self, name: str, revision: str) -> bool:
        return any(name == model and revision in ("", code) for model, code in self.loaded)

    def tell(self, read_ns: int, *entries: ModelEntry) -> None:
        """A worker tells these entries as read then, and is the only one."""
        self.told = [ToldCatalog({entry.id: entry for entry in entries}, read_ns, frozenset({"unserved"}))]
        self.follower.follow()


def test_the_newest_reading_is_served_whoever_tells_it() -> None:
    world = World()
    newer, older = (ToldCatalog({e.id: e}, ns) for e, ns in ((version(2), 30), (version(1), 20)))
    for told in ([], [older], [older, newer], [older], []):
        world.told = told
        world.follower.follow()
    assert world.catalog.versions == {"m": (2,)}
    assert list(world.catalog) == ["m@2"], "the files of a reading later than the start have no other model"


def test_files_that_a_reload_has_read_later_than_the_workers_stay() -> None:
    world = World(read_ns=25)
    world.tell(20, NEW, version(1))
    assert list(world.catalog) == ["org/old", "m@1"] and world.catalog.names == {"org/old"}
    world.tell(30, NEW, version(1))
    assert list(world.catalog) == ["org/new", "m@1"] and world.catalog.names == {"unserved"}


def test_an_old_version_stays_until_a_chosen_one_is_loaded_as_its_files_are() -> None:
    world = World()
    world.tell(20, version(1, "a"))
    world.loaded = {("m@1", "a")}
    world.tell(30, version(2, "b"))
    assert world.catalog.versions == {"m": (1, 2)} and world.follower.chosen("m") == (2,)
    world.loaded.add(("m@2", "older files"))
    world.follower.follow()
    assert world.catalog.versions == {"m": (1, 2)}
    world.loaded.add(("m@2", "b"))
    world.follower.follow()
    assert world.catalog.versions == {"m": (2,)} and world.follower.removed == {("m", 1)}


def test_a_model_without_a_version_is_never_called_removed() -> None:
    world = World()
    world.tell(20, version(NO_VERSION, error="there is no version"))
    world.tell(30)
    assert not world.catalog and not world.follower.removed


def repository_entry(number: int) -> RepositoryEntry:
    """As a worker has read the version."""
    source = DirectorySource(f"/models/m/{number}")
    config = ModelConfig("m")
    return RepositoryEntry(
        id=f"m@{number}", source=source, model="m", version=number, config=config, directory="/models/m"
    )


def test_a_worker_tells_what_has_changed_in_the_order_of_its_catalog_and_no_paths() -> None:
    telling, first = ToldEntries(), Catalog([OLD, repository_entry(1)], names=["org/old", "org/else"])
    told = telling.changes(first)
    assert told == telling.all() and telling.changes(first) is None
    assert told is not None and (told.read_ns, told.names) == (first.read_ns, ["org/else", "org/old"])
    assert "/models" not in str(told)
    known = ToldCatalog().after(told)
    second = Catalog([NEW, OLD, repository_entry(2), repository_entry(1)])
    changes = telling.changes(second)
    assert isinstance(changes, Entries)
    assert ([e.id for e in changes.models], [e.id for e in changes.versions]) == (["org/new"], ["m@2"])
    known = known.after(changes)
    assert list(known.entries) == ["org/new", "org/old", "m@2", "m@1"] and known.read_ns == second.read_ns
    third = telling.changes(Catalog([OLD]))
    assert third is not None and list(known.after(third).entries) == ["org/old"]


@pytest.mark.parametrize(
    "options",
    [
        "runtime: {x: 1000000000000000000000000000000}",
        "loadtime: {x: {1: 2}}",
        "profiles: {other: {runtime: {x: -1000000000000000000000000000000}}}",
        "runtime: &all {x: *all}",
    ],
)
def test_the_entry_of_a_file_with_options_that_no_message_can_tell_is_told_with_its_mistake(
    options: str, tmp_path: Path
) -> None:
    (tmp_path / "m.yaml").write_text(f"id: org/m\nsource: {{kind: adapter}}\n{options}\n")
    catalog = read_served(CatalogSettings(dirs=(str(tmp_path),)), Repository())
    told = ToldEntries().changes(catalog)
    assert told is not None and codec.decode_to_frontend(codec.encode(told)) == told
    catalog_files.keep(tmp_path, CatalogSettings(), catalog)
    (entry,) = told.models
    assert entry.id == "org/m" and entry.error
