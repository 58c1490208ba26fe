"""The frontend's follower of the catalog: whatever a look raises, it looks again, and nothing that was read stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.engine import catalog_following
from frontend.engine.catalog_following import CatalogFollower
from ipc import settings
from ipc.catalog.entries import Catalog, DirectorySource, ModelEntry, load_catalog
from ipc.errors import ConfigError
from ipc.store.store import Store

OLD, NEW = (ModelEntry(f"org/{name}", DirectorySource("/w")) for name in ("old", "new"))


def follower_of(tmp_path: Path, catalog: Catalog) -> CatalogFollower:
    """That of a frontend with this catalog, whose files lie in `tmp_path`."""
    chosen = settings.load(
        flags={"catalog.dirs": str(tmp_path), "run.dir": str(tmp_path / "run")}, environ={}
    )
    return CatalogFollower(chosen, catalog, Store(chosen.paths))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("broken"),
        OSError("gone"),
        RecursionError("deep"),
        MemoryError(),
        KeyError("strange"),
        Exception(),
    ],
)
def test_after_any_exception_the_next_change_is_still_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(catalog_following, "EVERY_S", 0.001)
    found: list[Callable[[], Catalog | None]] = []

    def fail() -> Catalog | None:
        raise error

    found += [fail, fail, lambda: None, lambda: Catalog([NEW])]
    catalog = Catalog([OLD])
    follower = follower_of(tmp_path, catalog)
    monkeypatch.setattr(follower, "look", lambda: found.pop(0)() if found else None)

    async def follow() -> None:
        task = asyncio.create_task(follower.run())
        try:
            async with asyncio.timeout(10):
                while "org/new" not in catalog:
                    assert not task.done(), "the follower has ended"
                    await asyncio.sleep(0.001)
        finally:
            task.cancel()

    asyncio.run(follow())
    assert list(catalog) == ["org/new"]


def test_a_change_whose_reading_was_given_up_is_read_again(tmp_path: Path) -> None:
    text = "id: org/{}\nsource: {{kind: directory, path: /w}}\n"
    (tmp_path / "old.yaml").write_text(text.format("old"))
    catalog = load_catalog([str(tmp_path)])
    follower = follower_of(tmp_path, catalog)
    (tmp_path / "new.yaml").write_text(text.format("new"))
    begun, ended, opening = threading.Event(), threading.Event(), follower._open

    def slow() -> Catalog:
        begun.set()
        ended.wait(20)
        return opening()

    async def give_up() -> None:
        follower._open = slow  # type: ignore[method-assign]
        reading = asyncio.create_task(follower.reload())
        await asyncio.to_thread(begun.wait, 20)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        ended.set()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(give_up())
    assert "org/new" not in catalog
    follower._open = opening  # type: ignore[method-assign]
    looks = [follower.look() for _ in range(3)]
    assert [sorted(found) for found in looks if found is not None] == [["org/new", "org/old"]]


def test_a_change_that_was_read_by_itself_and_taken_back_before_a_look_does_not_stay(tmp_path: Path) -> None:
    text = "id: org/{}\nsource: {{kind: directory, path: /w}}\n"
    (tmp_path / "old.yaml").write_text(text.format("old"))
    catalog = load_catalog([str(tmp_path)])
    follower = follower_of(tmp_path, catalog)
    brought = tmp_path / "new.yaml"
    brought.write_text(text.format("new"))
    assert asyncio.run(follower.reload())
    assert "org/new" in catalog
    brought.unlink()
    looks = [follower.look() for _ in range(3)]
    assert [list(found) for found in looks if found is not None] == [["org/old"]]
