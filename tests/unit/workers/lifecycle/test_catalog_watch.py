"""Catalog files that change: noticed once, after they have settled. Models of the start, by the settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from ipc import settings
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry, Profile
from ipc.catalog.reading import check_lists, preloaded_names, read_catalog
from ipc.errors import ConfigError
from workers.lifecycle import loads
from workers.lifecycle.loads import LoadCrashes
from workers.repository import catalog_files
from workers.repository.catalog_files import CatalogWatch, look, open_accepted

MODEL = "id: {}\nsource: {{kind: directory, path: /weights}}\n"


def test_a_change_counts_once_and_only_when_it_has_settled(tmp_path: Path) -> None:
    watch = CatalogWatch([str(tmp_path)])
    assert not watch.changed()
    (tmp_path / "a.yaml").write_text(MODEL.format("a"))
    assert [watch.changed() for _ in range(3)] == [False, True, False]
    (tmp_path / "a.yaml").write_text(MODEL.format("ab"))
    assert not watch.changed(), "the editor may still be writing"
    (tmp_path / "a.yaml").write_text(MODEL.format("abc"))
    assert [watch.changed() for _ in range(3)] == [False, True, False]
    (tmp_path / "a.yaml").unlink()
    assert [watch.changed() for _ in range(3)] == [False, True, False]


def test_a_change_between_reading_and_watching_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MODEL.format("a"))
    catalog = catalog_files.open_catalog(settings.Catalog(dirs=(str(tmp_path),)), settings.Repository())
    (tmp_path / "b.yaml").write_text(MODEL.format("b"))
    watch = CatalogWatch([str(tmp_path)], catalog.files)
    assert [watch.changed(), watch.changed()] == [False, True]


def test_what_was_read_between_two_looks_is_what_the_next_is_held_against(tmp_path: Path) -> None:
    watch = CatalogWatch([str(tmp_path)])
    (tmp_path / "a.yaml").write_text(MODEL.format("a"))
    watch.was_read(look([str(tmp_path)]))
    (tmp_path / "a.yaml").unlink()
    assert [watch.changed() for _ in range(2)] == [True, False]


def test_a_catalog_is_replaced_for_all_who_hold_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MODEL.format("a"))
    held = read_catalog([str(tmp_path)])
    (tmp_path / "a.yaml").write_text(MODEL.format("b"))
    held.replace(read_catalog([str(tmp_path)]))
    assert list(held) == ["b"]


def test_a_named_model_whose_file_is_gone_is_a_mistake_at_the_start_only(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(MODEL.format(name))
    (tmp_path / "b.yaml").unlink()
    with pytest.raises(ConfigError, match="unknown model 'b'"):
        read_catalog([str(tmp_path)], ["a", "b"])
    assert list(read_catalog([str(tmp_path)], ["a", "b"], vanished_ok=True)) == ["a"]


CATALOG = Catalog(
    [
        ModelEntry("org/a", DirectorySource("/w"), profiles={"p": Profile(runtime={"x": 1})}),
        ModelEntry("org/b", DirectorySource("/w")),
    ]
)
EVERY = ["org/a", "org/a:p", "org/b"]


@pytest.mark.parametrize(
    ("preload", "models", "serve_all", "expected"),
    [
        (["auto"], [], False, EVERY),
        (["auto"], ["org/a", "org/b"], False, EVERY),
        (["auto"], [], True, []),
        (["*"], [], True, EVERY),
        ([], [], False, []),
        (["org/a"], [], False, ["org/a", "org/a:p"]),
        (["org/a:p"], [], False, ["org/a:p"]),
    ],
)
def test_models_of_the_start(
    preload: list[str], models: list[str], serve_all: bool, expected: list[str]
) -> None:
    assert preloaded_names(CATALOG, preload, models, serve_all) == expected


def test_names_that_no_model_has_are_refused_with_the_nearest_one() -> None:
    check_lists(CATALOG, ["auto", "*", "org/a:p"], ["*", "org/b"])
    with pytest.raises(ConfigError, match=r"catalog.preload: unknown model 'org/x'.*did you mean"):
        check_lists(CATALOG, ["org/x"], [])
    with pytest.raises(ConfigError, match=r"catalog.pinned: unknown model"):
        check_lists(CATALOG, [], ["orgb"])


def test_a_model_is_blamed_for_the_second_death_in_its_load_only(tmp_path: Path) -> None:
    root = tmp_path / "loading"
    first = LoadCrashes(root, 0)
    first.begin("deadly")
    first.begin("innocent")
    second = LoadCrashes(root, 0)
    assert second.verdict("deadly") is None
    second.begin("deadly")
    third = LoadCrashes(root, 0)
    verdict = third.verdict("deadly")
    assert verdict is not None and not verdict.permanent
    assert third.verdict("deadly") is None, "it may be tried again later"
    assert third.verdict("innocent") is None
    third.begin("innocent")
    third.end("innocent")
    assert not list(root.glob("0.*"))
    third.begin("deadly")
    other = LoadCrashes(root, 1)
    other.begin("innocent")
    assert other.may_begin("deadly"), "other slots have marks of their own"


def killed_while_loading(root: Path, model: str, times: int, ended_by: str = "signal-9") -> LoadCrashes:
    """The life of a slot after so many deaths in the load of a model."""
    for _ in range(times):
        life = LoadCrashes(root, 0, ended_by)
        assert life.verdict(model) is None
        life.begin(model)
    return LoadCrashes(root, 0, ended_by)


@pytest.mark.parametrize("ended_by", ["signal-9", ""])
def test_a_model_that_has_loaded_well_is_trusted_for_some_kills_from_outside(
    tmp_path: Path, ended_by: str
) -> None:
    LoadCrashes(tmp_path, 1).end("tried", well=True)
    assert killed_while_loading(tmp_path, "tried", 4, ended_by).verdict("tried") is None
    last = killed_while_loading(tmp_path, "tried", 1, ended_by).verdict("tried")
    assert last is not None and "died 5 times" in last.message, "what kills by SIGKILL ends as well"
    assert killed_while_loading(tmp_path, "new", 2, ended_by).verdict("new") is not None


@pytest.mark.parametrize("ended_by", ["signal-11", "signal-6", "exit-0", "exit-70", "hang"])
def test_a_death_that_is_no_kill_from_outside_ends_the_trust(tmp_path: Path, ended_by: str) -> None:
    LoadCrashes(tmp_path, 0).end("tried", well=True)
    assert killed_while_loading(tmp_path, "tried", 2, ended_by).verdict("tried") is not None


def test_a_refusal_holds_on_all_workers_until_one_of_them_loads_the_model_well(tmp_path: Path) -> None:
    guilty, beside = killed_while_loading(tmp_path, "m", 2), LoadCrashes(tmp_path, 1)
    assert guilty.verdict("m") is not None and beside.verdict("m") is not None
    assert beside.verdict("m") is None, "by hand it may be tried again"
    assert not guilty.forgiven("m")
    LoadCrashes(tmp_path, 2).end("m", well=True)
    assert guilty.forgiven("m") and not guilty.forgiven("m") and not guilty.forgiven("other")
    assert LoadCrashes(tmp_path, 3).verdict("m") is None


def test_a_worker_that_ends_in_order_leaves_no_mark_of_the_loads_that_still_run(tmp_path: Path) -> None:
    marks = LoadCrashes(tmp_path, 0)
    marks.begin("slow")
    marks.close()
    marks.begin("too-late")
    assert not list(tmp_path.iterdir())


def test_only_suspects_are_loaded_one_at_a_time(tmp_path: Path) -> None:
    first = LoadCrashes(tmp_path, 0)
    first.begin("a")
    first.begin("b")
    marks = LoadCrashes(tmp_path, 0)
    assert marks.may_begin("a")
    marks.begin("a")
    assert not marks.may_begin("b") and marks.may_begin("other")
    marks.end("a")
    assert marks.may_begin("b")


def test_a_mark_that_nobody_tries_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = LoadCrashes(tmp_path, 0)
    first.begin("stale")
    first.begin("slow")
    marks = LoadCrashes(tmp_path, 0)
    marks.begin("slow")
    assert not marks.may_begin("stale")
    monkeypatch.setattr(loads, "KEPT_S", 0.0)
    assert marks.may_begin("stale") and len(list(tmp_path.iterdir())) == 1, "what is being tried is kept"
    assert LoadCrashes(tmp_path, 0).verdict("slow") is None
    monkeypatch.undo()
    assert LoadCrashes(tmp_path, 0).verdict("stale") is None


def test_directories_that_vanish_during_a_look_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.yaml").write_text(MODEL.format(name))
    scandir = os.scandir

    def racing(path: str) -> object:
        if path.endswith("/b"):
            Path(path, "m.yaml").unlink()
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert {Path(found[0]).parent.name for found in look([str(tmp_path)])} == {"a", "c"}


@pytest.mark.parametrize(
    "text",
    [
        "runtime: &a {x: *a}",
        "runtime: {x: 123456789012345678901234567890}",
        "loadtime: {d: 2020-01-01}",
        "profiles: {p: {runtime: {x: " + "[" * 40 + "]" * 40 + "}}}",
        "runtime: {x: " + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_options_that_no_load_could_tell_apart_are_refused_with_their_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(MODEL.format("m") + text)
    [bad] = read_catalog([str(tmp_path)]).reading.bad
    assert bad.message.startswith(f"{tmp_path}/m.yaml:") and bad.entry is not None and bad.entry.error


def test_a_worker_that_starts_again_serves_what_is_left_or_what_was_accepted_last(tmp_path: Path) -> None:
    root, files = tmp_path / "run", tmp_path / "models"
    root.mkdir()
    files.mkdir()
    for name in "ab":
        (files / f"{name}.yaml").write_text(MODEL.format(name))
    chosen = settings.load(
        flags={"catalog.dirs": str(files), "catalog.models": "a,b", "catalog.preload": "b"}, environ={}
    ).catalog
    assert list(open_accepted(root, chosen)) == ["a", "b"]
    (files / "b.yaml").unlink()
    assert list(open_accepted(root, chosen)) == ["a"], "a file is gone, and the start names its model"
    (files / "a.yaml").write_text("id: [")
    assert list(open_accepted(root, chosen)) == ["a"], "the one that was accepted last"
    with pytest.raises(ConfigError):
        open_accepted(root, replace(chosen, preload=("c",)))
    for kept in (b"{", b'{"chosen": "\xff"}'):
        (root / "catalog.json").write_bytes(kept)
        with pytest.raises(ConfigError):
            open_accepted(root, chosen)
