"""Overrides of one server: what may be brought, who may change them, what a dead process leaves."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from ipc import deadline
from ipc.catalog.repository import is_model_name
from ipc.errors import DeadlineExceeded, InvalidInput
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Repository, Settings, load
from ipc.store.overrides import Overrides
from ipc.store.store import Store, StoreUnreadable
from tests.harness.server import FAKE_CATALOG
from tests.tiny.program_sources import IDENTITY
from workers.repository import entries
from workers.repository import opening as catalog_opening
from workers.repository.opening import open_catalog

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
def overrides(settings: Settings) -> Overrides:
    """Those of that server."""
    return Overrides(settings.paths, Store(settings.paths))


@pytest.mark.parametrize("name", ["", ".", "..", "...", ".x", "a/b", "a\\b", "a@1", " a", "a\n", "x" * 201])
def test_names_that_lead_elsewhere_are_no_names(overrides: Overrides, name: str) -> None:
    assert not is_model_name(name)
    with pytest.raises(InvalidInput, match="is no name for a model"):
        overrides.draft(name, "{}", FILES)
    assert not list(overrides.directory.iterdir())


@pytest.mark.parametrize("path", ["../x", "/etc/x", "", ".", "1/../../x", ".."])
def test_a_file_lies_below_its_model(overrides: Overrides, path: str) -> None:
    with pytest.raises(InvalidInput, match="is no path below the model's directory"):
        overrides.draft("m", "{}", {"1/model.py": b"", path: b""})
    assert not list(overrides.directory.iterdir())


def test_nobody_else_can_read_what_was_brought(overrides: Overrides) -> None:
    asyncio.run(overrides.put(overrides.draft("m", "{}", {"1/deep/more/model.py": b"", **FILES})))
    for path in overrides.directory.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_one_at_a_time_changes_overrides(settings: Settings, overrides: Overrides) -> None:
    other, order = Overrides(settings.paths, Store(settings.paths)), list[str]()

    async def second() -> None:
        async with other.locked(deadline.after(20)):
            order.append("second")

    async def work() -> None:
        async with overrides.locked(deadline.after(1)):
            with pytest.raises(DeadlineExceeded, match="before another load"):
                await other.locked(deadline.after(0)).__aenter__()
            waiting = asyncio.create_task(second())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.1)
            order.append("first")
        await waiting

    asyncio.run(work())
    assert order == ["first", "second"]


def test_what_a_dead_process_left_is_swept_when_a_frontend_starts(
    settings: Settings, overrides: Overrides
) -> None:
    kept = overrides.draft("m", "{}", FILES)
    asyncio.run(overrides.put(kept))
    left = overrides.draft("m", "{}", FILES)
    asyncio.run(overrides.sweep_unless_locked())
    assert not overrides.root_of(left).exists() and overrides.root_of(kept).is_dir()
    assert {path.name for path in overrides.directory.iterdir()} <= {".lock", kept.files}
    found = open_catalog(settings.catalog, settings.repository, overrides=overrides)
    assert "m@1" in found, "what is in force is served from the start"


def test_nothing_is_swept_while_the_store_cannot_be_read(
    overrides: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = overrides.draft("m", "{}", FILES)
    asyncio.run(overrides.put(kept))

    def refuse(store: Store, how: object) -> None:
        raise StoreUnreadable(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "attempt", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            overrides.sweep()
    assert overrides.get("m") == kept and overrides.root_of(kept).is_dir()


def test_a_frontend_that_starts_during_a_load_sweeps_nothing(
    settings: Settings, overrides: Overrides
) -> None:
    async def work() -> None:
        async with overrides.locked(deadline.after(1)):
            drafted = overrides.draft("m", "{}", FILES)
            await Overrides(settings.paths, Store(settings.paths)).sweep_unless_locked()
            assert overrides.root_of(drafted).is_dir()

    asyncio.run(work())


def test_an_override_with_the_name_of_a_catalog_model_is_left_out(
    settings: Settings, overrides: Overrides, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(overrides.put(overrides.draft("echo", "{}", FILES)))
    asyncio.run(overrides.put(overrides.draft("m", "{}", FILES)))
    found = open_catalog(settings.catalog, settings.repository, overrides=overrides)
    assert sorted(found) == ["fake/echo", "m@1"]
    assert "'echo', which a load brought, is left out" in caplog.text
    for _ in range(2):
        found = catalog_opening.open_accepted(
            settings.paths.root, settings.catalog, settings.repository, overrides
        )
        assert sorted(found) == ["fake/echo", "m@1"]


def test_a_file_that_cannot_be_looked_at_is_told(tmp_path: Path, overrides: Overrides) -> None:
    chosen = Repository(dirs=(str(tmp_path / "models"),))
    override = overrides.draft(
        "m", f'{{"backend": "onnx", "default_model_filename": "{"x" * 300}"}}', {"1/model.pt2": b""}
    )
    with pytest.raises(InvalidInput, match=r"^the files cannot be read: File name too long"):
        entries.refuse_draft(chosen, overrides, override)
