"""Models that were loaded and unloaded by name are remembered by all processes until the server starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipc.processes import sweep
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.store.marks import Marks


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory that no server uses."""
    found = RunPaths(tmp_path, "t")
    prepare_run_dir(found)
    return found


def test_the_last_word_counts_for_every_process(paths: RunPaths) -> None:
    first, second = Marks(paths), Marks(paths)
    assert second.get("add") is None
    for loaded in (True, False, True):
        first.put("add", loaded=loaded)
        assert second.get("add") is loaded
    assert second.get("other") is None
    sweep.forget(paths)
    assert first.get("add") is None


@pytest.mark.parametrize("name", ["../../x", "org/name", "\ud800", "x" * 5000, ""])
def test_any_text_may_be_a_name(paths: RunPaths, name: str) -> None:
    Marks(paths).put(name, loaded=False)
    assert Marks(paths).get(name) is False
    assert len(list(paths.control().iterdir())) == 1


def test_a_worker_that_starts_again_has_what_was_loaded_and_not_what_was_unloaded(paths: RunPaths) -> None:
    marks = Marks(paths)
    served = ["a@1", "a@2", "b@1", "c@1", "org/name"]
    assert marks.adjust(["c@1", "a@1"], served) == ["a@1", "c@1"]
    marks.put("a", loaded=False)
    marks.put("b", loaded=True)
    marks.put("org/name", loaded=True)
    assert marks.adjust(["a@1", "c@1"], served) == ["b@1", "c@1", "org/name"]


def test_what_cannot_be_read_is_not_loaded_at_the_start_and_the_others_are(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marks, get = Marks(paths), Marks.get

    def short(self: Marks, model: str) -> bool | None:
        if model == "b":
            raise OSError(24, "Too many open files")
        return get(self, model)

    monkeypatch.setattr(Marks, "get", short)
    assert marks.adjust(["a@1", "b@1", "c@1"], ["a@1", "b@1", "c@1"]) == ["a@1", "c@1"]
    assert "b@1" in caplog.text and "Too many open files" in caplog.text
