"""Bells that wake processes which wait, and kernels that have no watch left."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontend.state import places as module
from frontend.state.places import Bell

RING = "import sys\nfrom pathlib import Path\nfrom frontend.state.places import Bell\nBell(Path(sys.argv[1])).ring()"


def _descriptors() -> set[str]:
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        # The descriptor of the listing itself is closed by now.
        with suppress(FileNotFoundError):
            found.add(str(each.readlink()))
    return found


def test_a_ring_of_another_process_wakes_every_listener(tmp_path: Path) -> None:
    async def act() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        path = tmp_path / "bell"
        with Bell(path).listening(first.set) as hears, Bell(path).listening(second.set) as hears_too:
            assert hears and hears_too
            assert path.stat().st_mode & 0o777 == 0o600
            for _ in range(2):
                ringing = await asyncio.create_subprocess_exec(sys.executable, "-c", RING, str(path))
                assert await ringing.wait() == 0
                async with asyncio.timeout(60):
                    await first.wait()
                    await second.wait()
                first.clear()
                second.clear()

    asyncio.run(act())


def test_a_ring_without_a_listener_makes_no_file(tmp_path: Path) -> None:
    Bell(tmp_path / "bell").ring()
    assert not list(tmp_path.iterdir())


def test_a_listener_that_has_gone_leaves_no_descriptor(tmp_path: Path) -> None:
    async def act() -> None:
        heard: list[None] = []
        bell = Bell(tmp_path / "bell")
        with bell.listening(lambda: heard.append(None)):
            assert any("inotify" in each for each in _descriptors())
        assert not any("inotify" in each for each in _descriptors())
        bell.ring()
        await asyncio.sleep(0)
        assert not heard

    asyncio.run(act())


@pytest.mark.parametrize("missing", ["inotify_init1", "inotify_add_watch"])
def test_a_kernel_without_watches_is_told_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    refusing = {name: getattr(module._LIBC, name) for name in ("inotify_init1", "inotify_add_watch")}
    monkeypatch.setattr(module, "_LIBC", SimpleNamespace(**{**refusing, missing: lambda *_: -1}))

    async def act() -> None:
        with Bell(tmp_path / "bell").listening(lambda: None) as hears:
            assert not hears
            assert not any("inotify" in each for each in _descriptors())

    asyncio.run(act())


def test_a_directory_that_is_not_there_has_no_bell(tmp_path: Path) -> None:
    async def act() -> None:
        with Bell(tmp_path / "absent" / "bell").listening(lambda: None) as hears:
            assert not hears

    asyncio.run(act())
