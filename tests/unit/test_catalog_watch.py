"""Catalog files that change: noticed once, after they have settled. Models of the start, by the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc.catalog import (
    Catalog,
    DirectorySource,
    ModelEntry,
    Profile,
    check_lists,
    load_catalog,
    preloaded_names,
)
from ipc.catalog_watch import CatalogWatch
from ipc.errors import ConfigError
from workers.lifecycle.crashes import LoadMarks

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
    catalog = load_catalog([str(tmp_path)])
    (tmp_path / "b.yaml").write_text(MODEL.format("b"))
    watch = CatalogWatch([str(tmp_path)], catalog.files)
    assert [watch.changed(), watch.changed()] == [False, True]


def test_a_catalog_is_replaced_for_all_who_hold_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MODEL.format("a"))
    held = load_catalog([str(tmp_path)])
    (tmp_path / "a.yaml").write_text(MODEL.format("b"))
    held.replace(load_catalog([str(tmp_path)]))
    assert list(held) == ["b"]


def test_a_named_model_whose_file_is_gone_is_a_mistake_at_the_start_only(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(MODEL.format(name))
    (tmp_path / "b.yaml").unlink()
    with pytest.raises(ConfigError, match="unknown model 'b'"):
        load_catalog([str(tmp_path)], ["a", "b"])
    assert list(load_catalog([str(tmp_path)], ["a", "b"], vanished_ok=True)) == ["a"]


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
    first = LoadMarks(root, 0)
    first.begin("deadly"), first.begin("innocent")
    second = LoadMarks(root, 0)
    assert second.suspects and second.verdict("deadly") is None
    second.begin("deadly")
    third = LoadMarks(root, 0)
    verdict = third.verdict("deadly")
    assert verdict is not None and not verdict.permanent
    assert third.verdict("deadly") is None, "it may be tried again later"
    assert third.verdict("innocent") is None
    third.begin("innocent"), third.end("innocent")
    assert not LoadMarks(root, 0).suspects
    assert not LoadMarks(root, 1).suspects, "other slots have marks of their own"
