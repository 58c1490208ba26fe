"""Models that were loaded and unloaded by name are remembered by all processes until the server starts again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ipc import sweep
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.store.store import Marks, Store, StoreUnreadable, Table


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory that no server uses."""
    found = RunPaths(tmp_path, "t")
    prepare_run_dir(found)
    return found


def put(marks: Marks, model: str, loaded: bool) -> None:
    """Somebody loads or unloads a model."""
    asyncio.run(marks.put(model, loaded=loaded))


def test_the_last_word_counts_for_every_process(paths: RunPaths) -> None:
    first, second = Marks(Store(paths)), Marks(Store(paths))
    assert second.get("add") is None
    for loaded in (True, False, True):
        put(first, "add", loaded)
        assert second.get("add") is loaded
    assert second.get("other") is None
    sweep.forget(paths)
    assert first.get("add") is None


@pytest.mark.parametrize("name", ["../../x", "org/name", "\ud800", "x" * 5000, ""])
def test_any_text_may_be_a_name(paths: RunPaths, name: str) -> None:
    put(Marks(Store(paths)), name, False)
    assert Marks(Store(paths)).get(name) is False
    assert Marks(Store(paths)).get(f"{name}x") is None


@pytest.mark.parametrize("before", [True, False, None])
def test_a_load_that_failed_restores_the_mark(paths: RunPaths, before: bool | None) -> None:
    marks = Marks(Store(paths))
    if before is not None:
        put(marks, "add", before)
    put(marks, "add", True)
    asyncio.run(marks.restore("add", before))
    assert marks.get("add") is before


def test_an_unload_during_a_load_that_fails_stays(paths: RunPaths) -> None:
    marks = Marks(Store(paths))
    put(marks, "add", True)
    put(marks, "add", False)
    asyncio.run(marks.restore("add", True))
    assert marks.get("add") is False


def test_a_worker_that_starts_again_has_what_was_loaded_and_not_what_was_unloaded(paths: RunPaths) -> None:
    marks = Marks(Store(paths))
    served = ["a@1", "a@2", "b@1", "c@1", "org/name"]
    assert marks.adjust(["c@1", "a@1"], served) == ["a@1", "c@1"]
    put(marks, "a", False)
    put(marks, "b", True)
    put(marks, "org/name", True)
    assert marks.adjust(["a@1", "c@1"], served) == ["b@1", "c@1", "org/name"]


def test_nothing_is_loaded_at_the_start_if_the_marks_cannot_be_read(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(self: Table[bool]) -> None:
        raise StoreUnreadable(24, "Too many open files")

    monkeypatch.setattr(Table, "rows", rows)
    assert Marks(Store(paths)).adjust(["a@1", "b@1"], ["a@1", "b@1"]) == []
    assert "Too many open files" in caplog.text
