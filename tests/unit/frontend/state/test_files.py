"""Stored files as two frontends see them: owners, expiry, bounds, orphans, full disks, torn files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from frontend.state import files as module
from frontend.state.errors import FileElided, FilePlaceholder, StateUnavailable
from frontend.state.file_objects import INLINE_NBYTES, file_object, preview, text_slice
from frontend.state.files import CONTENTS, FILE, File, FileStore, Origin, Placeholder, clean_name
from ipc import settings
from ipc.errors import FileNotFound, StateFull
from tests.fakes.places import contents_at, in_both_places, place_at

T = TypeVar("T")
_UPLOAD = Origin("user_upload")
_CHILD = """
import asyncio, os, resource, signal, sys
from pathlib import Path
from frontend.state import files as module
from frontend.state.files import FileStore, Origin
from frontend.state.places import OnDisk
from ipc import settings
from ipc.errors import StateFull

kept = FileStore(OnDisk(Path(sys.argv[1])), settings.State())

async def add(content, name="a.txt", owner=""):
    return await kept.add(owner, content, name=name, purpose="user_data", origin=Origin("user_upload"))
"""


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _made(root: Path, **bounds: Any) -> FileStore:
    return FileStore(place_at(root), settings.State(**bounds))


async def _added(kept: FileStore, content: Any = b"hello", owner: str = "", **more: Any) -> File:
    return await kept.add(
        owner, content, **{"name": "a.txt", "purpose": "user_data", "origin": _UPLOAD} | more
    )


def _contents(root: Path) -> set[str]:
    return contents_at(root, CONTENTS)


async def _bytes(kept: FileStore, file: File) -> bytes:
    descriptor = await kept.open(file)
    try:
        return os.read(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


def _child(root: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    program = _CHILD + "\n".join(lines)
    return subprocess.run(
        [sys.executable, "-c", program, str(root)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_file_is_read_by_all_frontends_and_after_a_restart(tmp_path: Path) -> None:
    async def act() -> None:
        file = await _added(
            _made(tmp_path), b"\x00\xff" * 5, name="plot.png", id="file_ab_r0_1", container="cntr_1"
        )
        for kept in (_made(tmp_path), _made(tmp_path)):
            found = await kept.get("", "file_ab_r0_1")
            assert found == file
            assert (found.mime_type, found.format, found.nbytes, found.container) == (
                "image/png",
                "png",
                10,
                "cntr_1",
            )
            assert await _bytes(kept, found) == b"\x00\xff" * 5

    _run(act())
    assert (tmp_path / CONTENTS).stat().st_mode & 0o777 == 0o700


@in_both_places
def test_a_descriptor_is_copied_from_its_beginning_and_keeps_its_offset(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 3_000_000 + b"y")
    source = os.open(tmp_path / "source", os.O_RDONLY)
    os.lseek(source, 7, os.SEEK_SET)

    async def act() -> None:
        kept = _made(tmp_path)
        file = await _added(kept, source)
        assert file.nbytes == 3_000_001
        assert await kept.reading(file, lambda descriptor: os.pread(descriptor, 2, 2_999_999)) == b"xy"

    _run(act())
    assert os.lseek(source, 0, os.SEEK_CUR) == 7
    os.close(source)


@in_both_places
def test_files_of_another_key_do_not_exist(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        file = await _added(kept, owner="a", id="file_1")
        with pytest.raises(FileNotFound):
            await kept.get("b", file.id)
        with pytest.raises(FileNotFound):
            await kept.delete("b", file.id)
        with pytest.raises(FileNotFound):
            await kept.page("b", after=file.id)
        assert await kept.page("b") == ([], False)
        other = await _added(kept, b"other", owner="b", id="file_1")
        assert await _bytes(kept, await kept.get("a", "file_1")) == b"hello"
        assert await _bytes(kept, await kept.get("b", "file_1")) == b"other"
        await kept.delete("b", other.id)
        assert await _bytes(kept, await kept.get("a", "file_1")) == b"hello"

    _run(act())


@in_both_places
def test_a_file_under_a_known_id_replaces_the_file_and_its_content(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        await _added(kept, b"one", id="file_1")
        await _added(kept, b"two", id="file_1")
        assert await _bytes(kept, await kept.get("", "file_1")) == b"two"
        assert await kept.totals() == (1, 512 + 3)

    _run(act())
    assert len(_contents(tmp_path)) == 1


@in_both_places
def test_a_file_is_gone_when_its_time_is_over_and_the_sweep_deletes_the_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        long, short = await _added(kept), await _added(kept, expires_after_s=60)
        cut = await _added(kept, expires_after_s=1e9, id="file_cut")
        monkeypatch.setattr(module.time, "time", lambda: short.expires + 1)
        with pytest.raises(FileNotFound):
            await kept.get("", short.id)
        with pytest.raises(FileNotFound):
            await kept.delete("", short.id)
        assert [file.id for file in (await kept.page(""))[0]] == [long.id, "file_cut"]
        assert len(_contents(tmp_path)) == 3
        await _made(tmp_path).sweep()
        assert len(_contents(tmp_path)) == 2
        monkeypatch.setattr(module.time, "time", lambda: cut.expires + 1)
        assert await kept.page("") == ([], False)
        await kept.sweep()
        assert await kept.totals() == (0, 0)

    _run(act())
    assert not _contents(tmp_path)


@in_both_places
def test_a_clock_that_was_set_back_does_not_lengthen_a_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        kept, began = _made(tmp_path), time.time()
        file = await _added(kept)
        day = 86_400
        monkeypatch.setattr(module.time, "time", lambda: began - day)
        await kept.sweep()
        assert (await kept.get("", file.id)).expires == pytest.approx(began - day + 1_800)
        monkeypatch.setattr(module.time, "time", lambda: began - day + 1_801)
        with pytest.raises(FileNotFound):
            await kept.get("", file.id)

    _run(act())


@in_both_places
def test_too_many_files_of_a_key_push_out_its_oldest_only(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path, max_files=2)
        other = await _added(kept, owner="b")
        first, *rest = [await _added(kept, owner="a") for _ in range(3)]
        with pytest.raises(FileNotFound):
            await kept.get("a", first.id)
        assert (await kept.page("a"))[0] == rest
        assert (await kept.page("b"))[0] == [other]

    _run(act())
    assert len(_contents(tmp_path)) == 3


@in_both_places
def test_too_many_bytes_push_out_the_oldest_files_of_the_key_with_the_most(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path, max_files_bytes=10_000)
        small = await _added(kept, b"x" * 100, owner="small")
        large = [await _added(kept, b"x" * 3_000, owner="large") for _ in range(3)]
        assert (await kept.page("large"))[0] == large[1:]
        new = await _added(kept, b"x" * 8_000, owner="new")
        assert (await kept.page("large"))[0] == []
        assert (await kept.page("small"))[0] == [small]
        assert (await kept.page("new"))[0] == [new]
        with pytest.raises(
            StateFull, match=r"10001 bytes, all files may have 10000 \(state.max_files_bytes\)"
        ):
            await _added(kept, b"x" * 10_001)

    _run(act())


@in_both_places
def test_pages_end_and_follow_order_purpose_and_container(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        names = [f"file_{number}" for number in range(5)]
        for name in names:
            more = {"container": "cntr_1", "purpose": "agent_output"} if name == "file_3" else {}
            await _added(kept, id=name, **more)
        seen, after, has_more = list[str](), "", True
        while has_more:
            page, has_more = await kept.page("", after=after, limit=2)
            seen += [file.id for file in page]
            after = seen[-1]
        assert seen == names
        page, has_more = await kept.page("", after="file_2", order="desc")
        assert ([file.id for file in page], has_more) == (["file_1", "file_0"], False)
        assert [file.id for file in (await kept.page("", container="cntr_1"))[0]] == ["file_3"]
        assert [file.id for file in (await kept.page("", purpose="user_data", limit=2))[0]] == names[:2]
        with pytest.raises(FileNotFound, match="'nothing'"):
            await kept.page("", after="nothing")

    _run(act())


@in_both_places
def test_an_opened_file_is_read_to_its_end_after_it_was_deleted(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        file = await _added(kept, b"still here")
        descriptor = await kept.open(file)
        await kept.delete("", file.id)
        assert os.read(descriptor, 100) == b"still here"
        os.close(descriptor)
        with pytest.raises(FileNotFound):
            await kept.open(file)

    _run(act())
    assert not _contents(tmp_path)


@pytest.mark.parametrize("damage", ["short", "long", "gone", "link"])
def test_a_torn_content_is_no_file(tmp_path: Path, damage: str) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        file = await _added(kept, b"whole")
        path = tmp_path / CONTENTS / file.content
        if damage == "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "gone":
            path.unlink()
        else:
            path.write_bytes(b"who" if damage == "short" else b"whole and more")
        with pytest.raises(FileNotFound):
            await kept.open(file)
        with pytest.raises(FileNotFound):
            await file_object(kept, file)

    _run(act())


@pytest.mark.parametrize("stage", ["written", "named"])
def test_a_process_killed_before_its_row_leaves_an_orphan_that_the_sweep_deletes(
    tmp_path: Path, stage: str
) -> None:
    lines = {
        "written": "module.Draft._finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)",
        "named": "kept._insert = lambda connection, file: os.kill(os.getpid(), signal.SIGKILL)",
    }
    ended = _child(tmp_path, "asyncio.run(add(b'first'))", lines[stage], "asyncio.run(add(b'second'))")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(_contents(tmp_path)) == 2

    async def act() -> None:
        kept = _made(tmp_path)
        await kept.sweep()
        (file,), _ = await kept.page("")
        assert _contents(tmp_path) == {file.content}
        assert await _bytes(kept, file) == b"first"

    _run(act())


def test_a_process_killed_between_the_row_and_the_content_of_a_deleted_file_leaves_an_orphan(
    tmp_path: Path,
) -> None:
    kill = (
        "from frontend.state.content import Contents\n"
        "Contents._delete = lambda self, names: os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = _child(tmp_path, "file = asyncio.run(add(b'x'))", kill, "asyncio.run(kept.delete('', file.id))")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(_contents(tmp_path)) == 1
    _run(_made(tmp_path).sweep())
    assert not _contents(tmp_path)


@in_both_places
def test_the_sweep_leaves_a_content_whose_writer_lives_and_has_no_row_yet(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        await _added(kept, id="file_0")
        async with kept.draft() as draft:
            await draft.write(b"slow ")
            await _made(tmp_path).sweep()
            await draft.write(b"upload")
            await draft.finish()
            await _made(tmp_path).sweep()
            assert len(_contents(tmp_path)) == 2
        await _made(tmp_path).sweep()
        assert len(_contents(tmp_path)) == 1

    _run(act())


def test_the_sweep_looks_again_after_its_lock_for_a_row_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        file = await _added(kept)
        looks, named = list[set[str]](), kept._named

        async def late(names: Any) -> set[str]:
            looks.append(set(names))
            return set() if len(looks) == 1 else await named(names)

        monkeypatch.setattr(kept, "_named", late)
        await kept.sweep()
        assert looks == [{file.content}, {file.content}]
        assert await _bytes(kept, file) == b"hello"
        descriptor = await kept.open(file)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)

    _run(act())


@in_both_places
def test_a_refused_upload_leaves_nothing(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        with pytest.raises(RuntimeError):
            async with kept.draft() as draft:
                await draft.write(b"half")
                raise RuntimeError
        assert await kept.page("") == ([], False)

    _run(act())
    assert not _contents(tmp_path)


def test_two_processes_add_and_delete_at_once_and_agree(tmp_path: Path) -> None:
    lines = (
        "async def act():",
        "    for number in range(20):",
        "        file = await add(bytes([number]) * 50)",
        "        if number % 2: await kept.delete('', file.id)",
        "asyncio.run(act())",
    )
    program = _CHILD + "\n".join(lines)
    children = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]

    async def act() -> None:
        kept = _made(tmp_path)
        await kept.sweep()
        page, _ = await kept.page("")
        assert len(page) == 20
        assert {file.content for file in page} == _contents(tmp_path)
        firsts = [(await _bytes(kept, file))[0] for file in page]
        assert sorted(firsts) == sorted([*range(0, 20, 2)] * 2)

    _run(act())


@in_both_places
def test_a_cancelled_add_is_whole_or_not_there(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        for rounds in range(12):
            task = asyncio.ensure_future(_added(kept, b"x" * 5_000))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        page, _ = await kept.page("")
        assert {file.content for file in page} == _contents(tmp_path)
        for file in page:
            assert await _bytes(kept, file) == b"x" * 5_000

    _run(act())


@in_both_places
def test_a_full_disk_refuses_new_files_and_serves_the_old(tmp_path: Path) -> None:
    ended = _child(
        tmp_path,
        "async def act():",
        "    old = await add(b'old')",
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))",
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        "    try:",
        "        await add(b'x' * 100_000)",
        "    except StateFull as error:",
        "        print(error.status, error)",
        "    descriptor = await kept.open(await kept.get('', old.id))",
        "    print(os.read(descriptor, 10), len(os.listdir(kept._contents._directory)))",
        "asyncio.run(act())",
    )
    assert ended.stdout.splitlines() == ["507 the server has no room left to store this", "b'old' 1"], (
        ended.stderr
    )


@in_both_places
def test_a_database_without_room_is_told_as_full(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        await _added(kept)
        await kept._rows.write(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
        with pytest.raises(StateFull):
            for number in range(200):
                await _added(kept, id=f"file_{'x' * 5000}{number}")
        assert len((await kept.page(""))[0]) == len(_contents(tmp_path))

    _run(act())


def test_a_state_directory_that_cannot_be_used_is_told_as_unavailable(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no directory")

    async def act() -> None:
        kept = _made(tmp_path / "state")
        with pytest.raises(StateUnavailable):
            await _added(kept)
        with pytest.raises(StateUnavailable):
            await kept.get("", "file_1")
        await kept.sweep()

    _run(act())


def test_a_broken_database_is_put_aside_and_its_contents_are_swept(tmp_path: Path) -> None:
    _run(_added(_made(tmp_path)))
    for path in tmp_path.glob(f"{FILE}*"):
        path.write_bytes(b"no database at all, but long enough to be looked at")

    async def act() -> None:
        kept = _made(tmp_path)
        assert await kept.page("") == ([], False)
        await kept.sweep()

    _run(act())
    assert not _contents(tmp_path)


@in_both_places
def test_a_placeholder_and_an_imported_file_without_bytes_are_told_apart(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        lost = await _added(kept, None, placeholder=Placeholder("not_produced", "no such file"), name="a.csv")
        elided = await _added(kept, None, nbytes=9_000_000)
        with pytest.raises(FilePlaceholder, match="no such file"):
            await kept.open(await kept.get("", lost.id))
        with pytest.raises(FileElided):
            await kept.open(await kept.get("", elided.id))
        shown = await file_object(kept, await kept.get("", lost.id))
        assert (shown["code"], shown["message"], shown["bytes"]) == ("not_produced", "no such file", 0)
        shown = await file_object(kept, await kept.get("", elided.id))
        assert shown["bytes"] == 9_000_000
        assert not shown.keys() & {"text", "preview", "data_base64", "code"}
        assert (await kept.totals())[1] == 2 * 512

    _run(act())


@in_both_places
def test_a_file_object_holds_a_text_or_bytes_and_leaves_out_what_is_long(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        text = "ä" * 600
        shown = await file_object(
            kept, await _added(kept, text.encode(), origin=Origin("execute_python", 1, 2))
        )
        assert (shown["text"], shown["preview"]) == (text, "ä" * 512)
        assert shown["source"] == {"tool": "execute_python", "round": 1, "turn": 2}
        shown = await file_object(kept, await _added(kept, b"\xff\x00", name="a.bin"))
        assert (shown["data_base64"], shown["mime_type"]) == ("/wA=", "application/octet-stream")
        shown = await file_object(kept, await _added(kept, b"a" * INLINE_NBYTES))
        assert len(shown["text"]) == INLINE_NBYTES
        shown = await file_object(kept, await _added(kept, b"a" * (INLINE_NBYTES + 1)))
        assert shown["preview"] == "a" * 1024
        assert not shown.keys() & {"text", "data_base64"}
        long = b"\xff" + b"a" * INLINE_NBYTES
        assert not (await file_object(kept, await _added(kept, long))).keys() & {"preview", "data_base64"}

    _run(act())


@in_both_places
def test_slices_of_a_text_count_characters_over_the_borders_of_pieces(tmp_path: Path) -> None:
    async def act() -> None:
        kept = _made(tmp_path)
        text = "x" + "€" * 700_000 + "end"
        file = await _added(kept, text.encode())
        assert await text_slice(kept, file, 0, 3) == ("x€€", len(text))
        assert await text_slice(kept, file, 699_999, 700_004) == ("€€end", len(text))
        (most, _) = await text_slice(kept, file, 5, 700_000) or ("", 0)
        assert len(most) == 65_536
        assert await preview(kept, file, 3) == "x"
        for content in (b"\xe2\x82", b"ok\xff"):
            assert await text_slice(kept, await _added(kept, content), 0, 9) is None

    _run(act())


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\a.txt", "a.txt"),
        ("a\x00b\n.txt", "ab.txt"),
        ("..", "file"),
        ("", "file"),
        ("dir/", "dir"),
        ("\u202etxt.exe", "txt.exe"),
        ("\ud800.txt", ".txt"),
    ],
)
@in_both_places
def test_names_are_base_names_without_control_characters(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@in_both_places
def test_a_long_name_is_cut_and_keeps_its_ending() -> None:
    cut = clean_name("ä" * 300 + ".csv")
    assert len(cut.encode()) <= 255
    assert cut.endswith("ä.csv")
