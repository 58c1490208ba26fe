"""Wishes of one server: what may be brought, who may change them, what a dead process leaves."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from ipc import deadline, sweep
from ipc.catalog.repository import Wish, is_model_name
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.processes.paths import RunPaths, prepare_run_dir
from ipc.settings import Repository, Settings, load
from ipc.store.store import Store, StoreUnreadable, Table
from ipc.store.wishes import Wishes
from tests.harness.server import FAKE_CATALOG
from tests.tiny.program_sources import IDENTITY
from workers.repository import catalog_files, entries
from workers.repository.catalog_files import open_catalog

FILES = {"1/model.py": IDENTITY.encode(), "labels.txt": b"a\n"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Those of a server with a catalog of one model and an empty repository."""
    (tmp_path / "models").mkdir()
    chosen = {
        "run.dir": str(tmp_path / "run"),
        "repository.dirs": str(tmp_path / "models"),
        "repository.allow_python": "true",
        "catalog.dirs": str(FAKE_CATALOG),
        "catalog.models": "fake/echo",
    }
    found = load(None, chosen, {})
    prepare_run_dir(found.paths)
    return found


@pytest.fixture
def wishes(settings: Settings) -> Wishes:
    """Those of that server."""
    return Wishes(settings.paths, Store(settings.paths))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory that no server uses."""
    paths = RunPaths(tmp_path, "t")
    prepare_run_dir(paths)
    return paths


@pytest.mark.parametrize("name", ["", ".", "..", "...", ".x", "a/b", "a\\b", "a@1", " a", "a\n", "x" * 201])
def test_names_that_lead_elsewhere_are_no_names(wishes: Wishes, name: str) -> None:
    assert not is_model_name(name)
    with pytest.raises(InvalidInput, match="is no name for a model"):
        wishes.draft(name, "{}", FILES)
    assert not list(wishes.directory.iterdir())


@pytest.mark.parametrize("path", ["../x", "/etc/x", "", ".", "1/../../x", ".."])
def test_a_file_lies_below_its_model(wishes: Wishes, path: str) -> None:
    with pytest.raises(InvalidInput, match="is no path below the model's directory"):
        wishes.draft("m", "{}", {"1/model.py": b"", path: b""})
    assert not list(wishes.directory.iterdir())


def test_nobody_else_can_read_what_was_brought(wishes: Wishes) -> None:
    asyncio.run(wishes.put("m", wishes.draft("m", "{}", {"1/deep/more/model.py": b"", **FILES})))
    for path in wishes.directory.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_one_load_at_a_time_brings_something(settings: Settings, wishes: Wishes) -> None:
    other, order = Wishes(settings.paths, Store(settings.paths)), list[str]()

    async def second() -> None:
        async with other.locked(deadline.after(20)):
            order.append("second")

    async def work() -> None:
        async with wishes.locked(deadline.after(60)):
            with pytest.raises(DeadlineExceeded, match="before another load"):
                await other.locked(deadline.after(0)).__aenter__()
            waiting = asyncio.create_task(second())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.1)
            order.append("first")
        await waiting

    asyncio.run(work())
    assert order == ["first", "second"]


def test_what_a_dead_process_left_is_swept_when_a_frontend_starts(settings: Settings, wishes: Wishes) -> None:
    kept = wishes.draft("m", "{}", FILES)
    asyncio.run(wishes.put("m", kept))
    left = wishes.draft("m", "{}", FILES)
    asyncio.run(wishes.sweep_unless_locked())
    assert not wishes.root_of(left).exists() and wishes.root_of(kept).is_dir()
    assert {path.name for path in wishes.directory.iterdir()} <= {".lock", kept.files}
    found = open_catalog(settings.catalog, settings.repository, wishes=wishes)
    assert "m@1" in found, "what is in force is served from the start"


def test_nothing_is_swept_while_the_store_cannot_be_read(
    wishes: Wishes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = wishes.draft("m", "{}", FILES)
    asyncio.run(wishes.put("m", kept))

    def refuse(store: Store, how: object) -> None:
        raise StoreUnreadable(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "attempt", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            wishes.sweep()
    assert wishes.get("m") == kept and wishes.root_of(kept).is_dir()


def test_a_frontend_that_starts_during_a_load_sweeps_nothing(settings: Settings, wishes: Wishes) -> None:
    async def work() -> None:
        async with wishes.locked(deadline.after(60)):
            drafted = wishes.draft("m", "{}", FILES)
            await Wishes(settings.paths, Store(settings.paths)).sweep_unless_locked()
            assert wishes.root_of(drafted).is_dir()

    asyncio.run(work())


def test_a_brought_model_with_the_name_of_a_catalog_model_is_left_out(
    settings: Settings, wishes: Wishes, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(wishes.put("echo", wishes.draft("echo", "{}", FILES)))
    asyncio.run(wishes.put("m", wishes.draft("m", "{}", FILES)))
    found = open_catalog(settings.catalog, settings.repository, wishes=wishes)
    assert sorted(found) == ["fake/echo", "m@1"]
    assert "'echo', which a load brought, is left out" in caplog.text
    for _ in range(2):
        found = catalog_files.open_accepted(
            settings.paths.root, settings.catalog, settings.repository, wishes
        )
        assert sorted(found) == ["fake/echo", "m@1"]


def test_a_file_that_cannot_be_looked_at_is_told(tmp_path: Path, wishes: Wishes) -> None:
    chosen = Repository(dirs=(str(tmp_path / "models"),))
    draft = wishes.draft(
        "m", f'{{"backend": "onnx", "default_model_filename": "{"x" * 300}"}}', {"1/model.pt2": b""}
    )
    with pytest.raises(InvalidInput, match=r"^the files cannot be read: File name too long"):
        entries.refuse_draft(chosen, wishes, "m", draft)


def put(wishes: Wishes, model: str, loaded: bool) -> None:
    """Somebody loads or unloads a model."""
    asyncio.run(wishes.put(model, Wish(loaded=loaded)))


def test_the_last_word_counts_for_every_process(paths: RunPaths) -> None:
    first, second = Wishes(paths, Store(paths)), Wishes(paths, Store(paths))
    assert second.loaded("add") is None
    for loaded in (True, False, True):
        put(first, "add", loaded)
        assert second.loaded("add") is loaded
    assert second.loaded("other") is None
    sweep.forget(paths)
    assert first.loaded("add") is None


@pytest.mark.parametrize("name", ["../../x", "org/name", "\ud800", "x" * 5000, ""])
def test_any_text_may_be_a_name(paths: RunPaths, name: str) -> None:
    put(Wishes(paths, Store(paths)), name, False)
    assert Wishes(paths, Store(paths)).loaded(name) is False
    assert Wishes(paths, Store(paths)).loaded(f"{name}x") is None


@pytest.mark.parametrize("before", [True, False, None])
def test_a_load_that_failed_restores_the_wish_of_before(paths: RunPaths, before: bool | None) -> None:
    wishes = Wishes(paths, Store(paths))
    if before is not None:
        put(wishes, "add", before)
    former = wishes.get("add")
    failed = Wish(True, "{}")
    assert asyncio.run(wishes.put("add", failed)) == former
    assert asyncio.run(wishes.restore("add", failed, former)) and wishes.get("add") == former


@pytest.mark.parametrize("before", [Wish(True, "[]", "f"), Wish(loaded=False), None])
def test_a_load_that_failed_leaves_the_wish_of_a_load_that_came_meanwhile(
    paths: RunPaths, before: Wish | None
) -> None:
    wishes = Wishes(paths, Store(paths))
    if before is not None:
        asyncio.run(wishes.put("add", before))
    failed = Wish(True, "{}", "g")
    asyncio.run(wishes.put("add", failed))
    asyncio.run(wishes.wish_loaded("add"))
    assert wishes.is_in_force("add", failed)
    assert asyncio.run(wishes.restore("add", failed, before))
    assert wishes.get("add") == (before if before is not None and before.loaded else Wish(True))
    assert not wishes.is_in_force("add", failed)


def test_an_unload_during_a_load_that_fails_stays(paths: RunPaths) -> None:
    wishes = Wishes(paths, Store(paths))
    failed = Wish(True, "{}")
    asyncio.run(wishes.put("add", failed))
    put(wishes, "add", False)
    assert not asyncio.run(wishes.restore("add", failed, Wish(True)))
    assert wishes.loaded("add") is False


def test_a_worker_that_starts_again_has_what_was_loaded_and_not_what_was_unloaded(paths: RunPaths) -> None:
    wishes = Wishes(paths, Store(paths))
    served = ["a@1", "a@2", "b@1", "c@1", "org/name"]
    assert wishes.preloaded(["c@1", "a@1"], served) == ["a@1", "c@1"]
    put(wishes, "a", False)
    put(wishes, "b", True)
    put(wishes, "org/name", True)
    assert wishes.preloaded(["a@1", "c@1"], served) == ["b@1", "c@1", "org/name"]


def test_nothing_is_loaded_at_the_start_if_the_wishes_cannot_be_read(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(self: Table[Wish]) -> None:
        raise StoreUnreadable(24, "Too many open files")

    monkeypatch.setattr(Table, "rows", rows)
    assert Wishes(paths, Store(paths)).preloaded(["a@1", "b@1"], ["a@1", "b@1"]) == []
    assert "Too many open files" in caplog.text
