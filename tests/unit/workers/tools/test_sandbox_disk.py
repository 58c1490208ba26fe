"""The watch over the disk of work directories, and over sandboxes without a call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ipc.settings import Agent
from tests.unit.workers.tools.test_sandbox_layers import made
from workers.tools import processes
from workers.tools.processes import Broken, written_nbytes
from workers.tools.sandboxes import Sandbox, Sandboxes

FULL = 1 << 62
"""More free bytes than any disk has."""


def watched(root: Path, body: Callable[[Sandboxes], Awaitable[None]], **settings: Any) -> None:
    """Run a test over sandboxes that start no process; afterwards all of them end."""

    async def run() -> None:
        sandboxes = Sandboxes(Agent(**settings), made(**settings), root)
        try:
            await body(sandboxes)
        finally:
            await sandboxes.close()

    root.mkdir()
    asyncio.run(run())


async def holding(sandboxes: Sandboxes, name: str, nbytes: int) -> Sandbox:
    """A sandbox with a file."""
    sandbox = await sandboxes.get(None, name)
    fd = os.memfd_create("input")
    os.pwrite(fd, b"x" * nbytes, 0)
    async with sandbox.turn():
        await sandbox.put(fd, name)
    os.close(fd)
    return sandbox


def files_of(root: Path) -> set[str]:
    return {path.name for path in root.glob("*/*")}


def test_a_directory_of_the_operator_is_made_by_the_first_sandbox(tmp_path: Path) -> None:
    place = tmp_path / "above" / "own"

    async def body(sandboxes: Sandboxes) -> None:
        sandboxes.require_disk()
        await sandboxes.keep_free()
        await sandboxes.get(None, "one")
        assert place.is_dir()
        with pytest.raises(Broken, match=r"agent\.min_free_disk_bytes asks for"):
            sandboxes.require_disk()

    watched(tmp_path / "work", body, workdir=str(place), min_free_disk_bytes=FULL)


def test_a_full_disk_stops_no_second_sandbox_before_the_files_of_the_first_are_removed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "work"

    async def body(sandboxes: Sandboxes) -> None:
        large = await holding(sandboxes, "large", 1 << 20)
        await holding(sandboxes, "small", 1 << 12)
        async with large.turn():
            await sandboxes.keep_free()
            assert large.is_stopped
            await sandboxes.keep_free()
            assert files_of(root) == {"large", "small"}
        await large.check()
        assert files_of(root) == {"small"}
        await sandboxes.keep_free()
        assert files_of(root) == set()

    watched(root, body, min_free_disk_bytes=FULL)


def test_a_sandbox_that_ends_while_another_is_counted_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "work"

    async def body(sandboxes: Sandboxes) -> None:
        first, second = await holding(sandboxes, "first", 1), await holding(sandboxes, "second", 1)
        second.stop("a test")
        monkeypatch.setattr(first, "check", lambda: sandboxes.end(None, "second"))
        await sandboxes.check_all()
        assert files_of(root) == {"first"} and len(list(root.iterdir())) == 1

    watched(root, body)


def test_bytes_of_a_chain_of_processes_of_any_length_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 2000
    for pid in range(length):
        place = tmp_path / f"{pid}"
        (place / f"task/{pid}").mkdir(parents=True)
        (place / "io").write_text("wchar: 2\nwrite_bytes: 3\n")
        (place / f"task/{pid}/children").write_text(f"{pid + 1} ")
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path / Path(path).name)
    assert written_nbytes(0) == 3 * length
