"""The frontend's follower of the catalog: whatever a look raises, it looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend import catalog_following
from frontend.catalog_following import CatalogFollower
from ipc import settings
from ipc.catalog import Catalog, DirectorySource, ModelEntry
from ipc.errors import ConfigError

OLD, NEW = (ModelEntry(f"org/{name}", DirectorySource("/w")) for name in ("old", "new"))


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
    follower = CatalogFollower(settings.load(flags={"catalog.dirs": str(tmp_path)}, environ={}), catalog)
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
