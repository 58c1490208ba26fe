"""What operators are told of the state directory: room on its file system, files that are kept."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.state import state as states
from frontend.state.archives import from_parts
from frontend.state.files import FILE, Origin
from frontend.state.skills import FILE as SKILLS_FILE
from frontend.state.state import State
from ipc.settings import load


def _made(root: Path) -> State:
    return State(load(None, {"run.dir": str(root), "run.state_dir": str(root / "state")}))


def test_skills_lie_in_a_directory_of_their_own_where_the_settings_name_one(tmp_path: Path) -> None:
    places = {"run.state_dir": str(tmp_path / "state"), "state.skills_dir": str(tmp_path / "skills")}
    state = State(load(None, places))
    guide = b"---\nname: sums\ndescription: Adds.\n---\n"
    asyncio.run(state.skills.add("", from_parts([("sums/SKILL.md", guide)])))
    assert {path.name for path in (tmp_path / "skills").iterdir()} >= {SKILLS_FILE, "skills"}
    assert not (tmp_path / "state").exists()


def test_less_room_than_one_upload_may_have_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _made(tmp_path)
    free = 64 << 20
    asked: list[Path] = []

    def statvfs(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(f_bavail=free // 4096, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert not state.lacks_room()
    free -= 4096
    assert state.lacks_room()
    (tmp_path / "state").mkdir()
    state.lacks_room()
    assert asked == [tmp_path, tmp_path, tmp_path / "state"]


def test_a_file_system_that_does_not_tell_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> os.statvfs_result:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", refuse)
    assert not _made(tmp_path).lacks_room()


def test_a_sweep_counts_what_is_kept_and_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = list[asyncio.Event]()

    async def wait(seconds: float) -> None:
        swept[-1].set()
        await asyncio.Event().wait()

    async def counted() -> tuple[int, int]:
        swept.append(asyncio.Event())
        state.begin()
        await swept[-1].wait()
        state.end()
        return state.kept

    monkeypatch.setattr(
        states, "asyncio", SimpleNamespace(sleep=wait, get_running_loop=asyncio.get_running_loop)
    )
    state = _made(tmp_path)
    assert asyncio.run(counted()) == (0, 0)
    assert not (tmp_path / "state" / FILE).exists()
    asyncio.run(
        state.files.add("", b"hello", name="a.txt", purpose="user_data", origin=Origin("user_upload"))
    )
    count, nbytes = asyncio.run(counted())
    assert count == 1 and nbytes > 5
