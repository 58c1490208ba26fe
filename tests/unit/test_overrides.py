"""Overrides of one server: what may be brought, who may change them, what a dead process leaves."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from frontend.engine.catalog_following import CatalogFollower
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.catalog.repository import entries
from ipc.catalog.repository.layout import is_model_name
from ipc.catalog.repository.opening import open_catalog
from ipc.catalog.repository.overrides import Overrides
from ipc.errors import ConfigError, DeadlineExceeded, InvalidInput
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Repository, Settings, load
from ipc.store.store import Store, StoreUnreadable
from tests.harness.server import FAKE_CATALOG
from tests.tiny.program_sources import IDENTITY
from workers.lifecycle import catalog_opening

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


def follower_of(settings: Settings) -> tuple[CatalogFollower, Catalog]:
    """That of a frontend which has started without overrides, and its catalog."""
    catalog = open_catalog(settings.catalog, settings.repository)
    return CatalogFollower(settings, catalog, Store(settings.paths)), catalog


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
    follower, catalog = follower_of(settings)
    asyncio.run(follower.catch_up())
    assert not overrides.root_of(left).exists() and overrides.root_of(kept).is_dir()
    assert {path.name for path in overrides.directory.iterdir()} <= {".lock", kept.files}
    assert "m@1" in catalog, "what is in force is served from the start"


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
            await follower_of(settings)[0].catch_up()
            assert overrides.root_of(drafted).is_dir()

    asyncio.run(work())


def test_a_mistake_beside_an_override_stops_no_frontend(
    settings: Settings, overrides: Overrides, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower, catalog = follower_of(settings)
    before = catalog.sources
    asyncio.run(overrides.put(overrides.draft("m", "{}", FILES)))
    (tmp_path / "models").rmdir()
    with pytest.raises(ConfigError):
        asyncio.run(follower.reload())
    asyncio.run(follower.catch_up())
    assert catalog.sources == before
    assert "models that loads brought are not served" in caplog.text


def test_an_override_with_the_name_of_a_catalog_model_is_left_out(
    settings: Settings, overrides: Overrides, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(overrides.put(overrides.draft("echo", "{}", FILES)))
    asyncio.run(overrides.put(overrides.draft("m", "{}", FILES)))
    follower, catalog = follower_of(settings)
    asyncio.run(follower.catch_up())
    assert sorted(catalog) == ["fake/echo", "m@1"]
    assert "'echo', which a load brought, is left out" in caplog.text
    for _ in range(2):
        found = catalog_opening.open_catalog(
            settings.paths.root, settings.catalog, settings.repository, overrides
        )
        assert sorted(found) == ["fake/echo", "m@1"]


def test_an_older_catalog_never_takes_the_place_of_a_newer(
    settings: Settings, overrides: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, catalog = follower_of(settings)
    opened = list[list[str]]()
    began, go_on = asyncio.Event(), asyncio.Event()
    real = follower._open

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def slow_at_first() -> Catalog:
            found = real()
            opened.append(sorted(found))
            if len(opened) == 1:
                loop.call_soon_threadsafe(began.set)
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(20)
            return found

        monkeypatch.setattr(follower, "_open", slow_at_first)
        older = asyncio.create_task(follower.reload())
        await began.wait()
        await overrides.put(overrides.draft("m", "{}", FILES))
        newer = asyncio.create_task(follower.reload())
        await asyncio.wait([newer], timeout=0.5)
        go_on.set()
        await asyncio.gather(older, newer)

    asyncio.run(work())
    assert opened == [["fake/echo"], ["fake/echo", "m@1"]]
    assert sorted(catalog) == opened[-1]


def test_a_file_that_cannot_be_looked_at_is_told(tmp_path: Path, overrides: Overrides) -> None:
    chosen = Repository(dirs=(str(tmp_path / "models"),))
    override = overrides.draft(
        "m", f'{{"backend": "onnx", "default_model_filename": "{"x" * 300}"}}', {"1/model.pt2": b""}
    )
    [entry] = entries.overridden(chosen, overrides, override, "")
    assert entry.error == "the files cannot be read: File name too long"
