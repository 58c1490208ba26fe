"""Repositories as part of the catalog: names, what is loaded at the start, changes on disk, and a worker's restart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ipc.catalog.model_config import InstanceGroup, ModelConfig
from ipc.catalog.reading import preloaded_names
from ipc.catalog.repository import check_models, with_retained
from ipc.errors import ConfigError
from ipc.settings import Catalog as CatalogSettings
from ipc.settings import Repository
from tests.harness.server import FAKE_CATALOG
from workers.lifecycle import model_states
from workers.repository import catalog_files
from workers.repository.catalog_files import CatalogWatch, look, open_catalog
from workers.repository.entries import RepositoryEntry
from workers.repository.layout import ModelRefused

NONE = CatalogSettings()
FAKE = CatalogSettings(dirs=(str(FAKE_CATALOG),), models=("fake/echo",))


def model(root: Path, name: str, *versions: int, config: str = "version_policy { all { } }") -> Path:
    """A model whose programs are empty files."""
    for version in versions:
        place = root / name / str(version)
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.pt2").write_bytes(b"")
    (root / name / "config.pbtxt").write_text(config)
    return root


def settings(root: Path, **chosen: object) -> Repository:
    return Repository(dirs=(str(root),), **chosen)  # type: ignore[arg-type]


def names_loaded_first(chosen: CatalogSettings, repository: Repository) -> list[str]:
    catalog = open_catalog(chosen, repository)
    return preloaded_names(catalog, chosen.preload, chosen.models, chosen.serve_all)


def test_versions_are_entries_of_the_catalog_and_listed_ascending(tmp_path: Path) -> None:
    catalog = open_catalog(FAKE, settings(model(tmp_path, "m", 10, 2, 9)))
    assert list(catalog) == ["fake/echo", "m@2", "m@9", "m@10"]
    assert catalog.versions == {"m": (2, 9, 10)}
    entry = catalog["m@9"]
    assert isinstance(entry, RepositoryEntry) and (entry.model, entry.version) == ("m", 9)
    assert entry.encode_outputs == () and not entry.inputs


def test_with_a_repository_the_shipped_catalog_is_served_only_when_asked_for(tmp_path: Path) -> None:
    repository = settings(model(tmp_path, "m", 1))
    assert list(open_catalog(NONE, repository)) == ["m@1"]
    assert "fake/echo" in open_catalog(FAKE, repository)
    assert len(open_catalog(CatalogSettings(serve_all=True), repository)) > 100
    (tmp_path / "none").mkdir()
    assert list(open_catalog(NONE, settings(tmp_path / "none"))) == []


@pytest.mark.parametrize("name", ["echo", "fake"])
def test_no_two_models_have_one_name(tmp_path: Path, name: str) -> None:
    repository = settings(model(tmp_path, name, 1))
    if name == "fake":
        assert "fake@1" in open_catalog(FAKE, repository)
        return
    with pytest.raises(ConfigError, match="model 'echo' has a name of the catalog model 'fake/echo'"):
        open_catalog(FAKE, repository)


def test_all_versions_are_loaded_at_the_start_or_those_named(tmp_path: Path) -> None:
    model(model(tmp_path, "a", 1, 2), "b", 1)
    assert names_loaded_first(NONE, settings(tmp_path)) == ["a@1", "a@2", "b@1"]
    without = CatalogSettings(dirs=FAKE.dirs, models=FAKE.models, preload=())
    assert names_loaded_first(without, settings(tmp_path)) == ["a@1", "a@2", "b@1"]
    explicit = settings(tmp_path, control="explicit", models=("b",))
    assert names_loaded_first(NONE, explicit) == ["b@1"]
    assert names_loaded_first(CatalogSettings(preload=("*",)), explicit) == ["b@1"]
    assert names_loaded_first(FAKE, settings(tmp_path, control="explicit")) == ["fake/echo"]


def test_an_unknown_name_in_the_settings_is_told_with_the_nearest(tmp_path: Path) -> None:
    repository = settings(model(tmp_path, "resnet", 1), control="explicit", models=("resnte",))
    with pytest.raises(
        ConfigError, match=r"repository\.models: unknown model 'resnte'; did you mean 'resnet'"
    ):
        check_models(repository.models, open_catalog(NONE, repository).versions)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, CatalogWatch]]:
    model(tmp_path, "m", 1)
    yield tmp_path, CatalogWatch((), look((), [str(tmp_path)]), [str(tmp_path)])


def settled(watch: CatalogWatch) -> bool:
    """Whether a change is seen by the second of two equal looks, and not by the first."""
    return [watch.changed(), watch.changed()] == [False, True]


def test_every_change_of_a_repository_is_noticed_once_it_has_settled(
    watched: tuple[Path, CatalogWatch],
) -> None:
    root, watch = watched
    assert not watch.changed()
    model(root, "m", 2)
    assert settled(watch) and not watch.changed()
    os.truncate(root / "m" / "2" / "model.pt2", 10)
    assert settled(watch)
    (root / "m" / "config.pbtxt").write_text("")
    assert settled(watch)
    (root / "m" / "3").mkdir()
    assert settled(watch)
    shutil.rmtree(root / "m")
    assert settled(watch)
    (root / ".draft").mkdir()
    assert not watch.changed() and not watch.changed()


def test_only_the_version_whose_files_changed_is_loaded_anew(tmp_path: Path) -> None:
    repository = settings(model(tmp_path, "m", 1, 2))
    before = model_states.groups(open_catalog(NONE, repository)).keys()
    assert model_states.groups(open_catalog(NONE, repository)).keys() == before
    os.truncate(tmp_path / "m" / "2" / "model.pt2", 3)
    after = model_states.groups(open_catalog(NONE, repository))
    assert [entry.id for facts, [entry] in after.items() if facts not in before] == ["m@2"]
    (tmp_path / "m" / "labels.txt").write_text("a")
    assert not model_states.groups(open_catalog(NONE, repository)).keys() & before


def test_a_worker_that_starts_again_takes_the_repository_as_it_is(tmp_path: Path) -> None:
    root, run = tmp_path / "models", tmp_path / "run"
    run.mkdir()
    repository = settings(model(root, "m", 1))
    assert list(catalog_files.open_accepted(run, FAKE, repository)) == ["fake/echo", "m@1"]
    model(root, "m", 2)
    assert list(catalog_files.open_accepted(run, FAKE, repository)) == ["fake/echo", "m@1", "m@2"]
    model(root, "echo", 1)
    assert list(catalog_files.open_accepted(run, FAKE, repository)) == ["fake/echo"], (
        "two of one name: the catalog's stays"
    )
    shutil.rmtree(root)
    assert list(catalog_files.open_accepted(run, FAKE, repository)) == ["fake/echo"]
    with pytest.raises(ConfigError, match="cannot be read"):
        catalog_files.open_accepted(tmp_path, FAKE, repository)


def test_an_old_version_stays_until_a_chosen_one_is_loaded(tmp_path: Path) -> None:
    repository = settings(model(tmp_path, "m", 1, config=""))
    before = open_catalog(FAKE, repository)
    model(tmp_path, "m", 2, config="")
    wanted = open_catalog(FAKE, repository)
    loaded = {"m@1", "fake/echo"}

    def is_loaded(name: str, revision: str) -> bool:
        return name in loaded and (name != "m@2" or revision == wanted["m@2"].code)

    kept = with_retained(wanted, before.values(), is_loaded)
    assert list(kept) == ["fake/echo", "m@2", "m@1"] and kept.versions == {"m": (1, 2)}
    assert kept.files == wanted.files
    loaded.add("m@2")
    assert with_retained(wanted, kept.values(), is_loaded) is wanted
    assert with_retained(wanted, before.values(), lambda name, revision: False) is wanted, (
        "an old one that is not loaded"
    )
    model(tmp_path, "m", config="max_batch_size: many")
    broken = open_catalog(FAKE, repository)
    assert list(with_retained(broken, kept.values(), is_loaded)) == ["fake/echo", "m@2", "m@1"], (
        "the chosen version is loaded only as it was before its files changed"
    )
    shutil.rmtree(tmp_path / "m")
    gone = open_catalog(FAKE, repository)
    assert with_retained(gone, before.values(), is_loaded) is gone, "the whole model is gone"


def entry(*groups: InstanceGroup) -> RepositoryEntry:
    config = ModelConfig("m", instance_groups=groups)
    source = next(iter(open_catalog(FAKE, Repository()).values())).source
    return RepositoryEntry(id="m@1", source=source, model="m", version=1, config=config, directory="/nowhere")


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("groups", "slots"),
    [
        ((), [0, 1, 2, 3]),
        ((InstanceGroup(kind="KIND_GPU"),), [0, 1, 2, 3]),
        ((InstanceGroup(kind="KIND_GPU", gpus=(1, 3)),), [1, 3]),
        ((InstanceGroup(kind="KIND_GPU", gpus=(1,)), InstanceGroup(gpus=(2,))), [1, 2]),
        ((InstanceGroup(kind="KIND_GPU", gpus=(1,)), InstanceGroup(kind="KIND_CPU")), [0, 1, 2, 3]),
    ],
)
def test_instance_groups_choose_workers(groups: tuple[InstanceGroup, ...], slots: list[int]) -> None:
    assert [slot for slot in range(4) if model_states.offers(entry(*groups), slot, CUDA, 4)] == slots
    model_states.check_device(entry(*groups), CUDA, 4)


def test_a_group_that_no_worker_can_be_is_refused_by_all() -> None:
    far = entry(InstanceGroup(kind="KIND_GPU", gpus=(7,)))
    assert all(model_states.offers(far, slot, CUDA, 2) for slot in range(2))
    with pytest.raises(ModelRefused, match=r"instance_group: gpus \[7\], but the workers are 0 to 1"):
        model_states.check_device(far, CUDA, 2)
    on_gpu = entry(InstanceGroup(kind="KIND_GPU"))
    assert model_states.offers(on_gpu, 0, CPU, 1)
    with pytest.raises(ModelRefused, match="KIND_GPU, but the workers run on the CPU"):
        model_states.check_device(on_gpu, CPU, 1)
    model_states.check_device(entry(InstanceGroup(kind="KIND_CPU")), CPU, 1)
    model_states.check_device(entry(InstanceGroup(gpus=(0,))), CPU, 1)


@pytest.mark.parametrize(
    ("file", "text", "infers"),
    [
        ("config.pbtxt", "max_batch_size: 0", False),
        ("config.yaml", "max_batch_size: 0", False),
        ("config.pbtxt", "max_batch_size: 4", False),
        ("config.pbtxt", 'platform: "torch_export"', True),
        ("config.pbtxt", 'output { name: "A" data_type: TYPE_FP32 dims: 2 }', False),
    ],
)
def test_a_batch_size_of_0_is_told_from_none(tmp_path: Path, file: str, text: str, infers: bool) -> None:
    model(tmp_path, "m", 1)
    (tmp_path / "m" / "config.pbtxt").unlink()
    (tmp_path / "m" / file).write_text(text)
    entry = open_catalog(NONE, settings(tmp_path))["m@1"]
    assert isinstance(entry, RepositoryEntry) and entry.infers_batch == infers
