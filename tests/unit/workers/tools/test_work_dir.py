"""Work directories: paths that are refused, what counts as a change, bounds of a look."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ipc.wire.tools import Produced, Wanted
from workers.tools import files
from workers.tools.files import Refused, WorkDir, changed

FDS = Path("/proc/self/fd")


@pytest.fixture
def work(tmp_path: Path) -> WorkDir:
    return WorkDir(tmp_path / "work", shared=False)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/a",
        "..",
        "a/..",
        "a/../b",
        "a//b",
        "a/",
        ".",
        "a\nb",
        "a\0b",
        "\udcff",
        "x" * 256,
        "a/" * 40,
    ],
)
def test_a_path_that_leaves_the_directory_or_is_no_plain_name_is_refused(path: str) -> None:
    with pytest.raises(Refused):
        files.parts_of(path)


def test_changes_are_new_and_different_files_with_the_wanted_ones_first(work: WorkDir) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (work.path / name).write_text(name)
    before = work.look(1000)
    (work.path / "b.txt").write_text("other")
    (work.path / "d.txt").write_text("new")
    assert changed(before, work.look(1000), [Wanted("./z.png"), Wanted("a.txt")]) == [
        "z.png",
        "a.txt",
        "b.txt",
        "d.txt",
    ]


def test_a_look_ends_at_its_number_of_entries(work: WorkDir) -> None:
    for number in range(30):
        (work.path / f"{number}.txt").touch()
    seen = work.look(10)
    assert (seen.unseen, len(seen.files)) == (
        "has more than 10 files and folders (agent.max_workdir_files)",
        10,
    )
    assert (work.look(1000).unseen, len(work.look(1000).files)) == ("", 30)


def test_space_counts_hidden_and_left_out_files_as_well(work: WorkDir) -> None:
    (work.path / ".hidden").mkdir()
    (work.path / ".hidden" / "big.bin").write_bytes(bytes(1 << 20))
    seen = work.look(1000)
    assert seen.files == {}
    assert seen.used_nbytes >= 1 << 20


def test_a_file_with_several_links_takes_its_space_once_and_a_sparse_one_what_is_written(
    work: WorkDir,
) -> None:
    (work.path / "one").write_bytes(bytes(1 << 20))
    for number in range(5):
        os.link(work.path / "one", work.path / f"link-{number}")
    with (work.path / "sparse").open("wb") as file:
        file.truncate(100 << 20)
    assert 1 << 20 <= work.look(1000).used_nbytes < 2 << 20


def test_an_emptied_directory_can_be_used_again_and_a_shared_one_keeps_its_files(tmp_path: Path) -> None:
    for shared in (False, True):
        (tmp_path / "work").mkdir(exist_ok=shared)
        work = WorkDir(tmp_path / f"{shared}", shared=shared)
        (work.path / "closed" / "inner").mkdir(parents=True)
        (work.path / "closed").chmod(0)
        work.path.chmod(0)
        work.empty()
        work.path.chmod(0o700)
        assert (work.path / "closed").exists() == shared
        (work.path / "new").touch()
        assert "new" in work.look(1000).files
        (work.path / "closed").exists() and (work.path / "closed").chmod(0o700)
        work.close()


def test_files_are_produced_within_the_bytes_of_a_call(
    work: WorkDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_TOTAL_NBYTES", 10)
    for name in ("a", "b", "c"):
        (work.path / name).write_bytes(b"12345")
    produced, fds, left = work.produce(["a", "b", "c", "d"])
    assert produced == [
        Produced("a", 5),
        Produced("b", 5),
        Produced("c", 0, "too_large"),
        Produced("d", 0, "not_produced"),
    ]
    assert ([os.pread(fd, 9, 0) for fd in fds], left) == ([b"12345"] * 2, 0)
    (work.path / "a").write_bytes(b"changed")
    assert os.pread(fds[0], 9, 0) == b"12345", "the host hands out copies"
    for fd in fds:
        os.close(fd)


def test_a_folder_that_became_a_link_is_not_followed(work: WorkDir, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    (work.path / "folder").symlink_to(tmp_path / "outside")
    assert work.look(1000).files == {}
    assert work.produce(["folder/secret.txt"])[0] == [Produced("folder/secret.txt", 0, "not_produced")]


def test_a_look_has_few_descriptors_open_however_many_folders_there_are(work: WorkDir) -> None:
    for number in range(200):
        (work.path / f"{number}" / "inner").mkdir(parents=True)
    before, most = len(list(FDS.iterdir())), 0
    for _ in work._walk(1000):
        most = max(most, len(list(FDS.iterdir())) - before)
    assert most <= 8
    assert len(list(FDS.iterdir())) <= before


def test_a_look_that_cannot_see_everything_says_so(work: WorkDir) -> None:
    assert not work.look(1000).unseen
    deep = work.path.joinpath(*["d"] * (files.MAX_DEPTH + 1))
    deep.mkdir(parents=True)
    assert work.look(1000).unseen == "has more than 32 levels of folders"


def test_copies_need_no_access_to_the_folder_above(work: WorkDir) -> None:
    (work.path / "a").write_bytes(b"x")
    _, (fd,), _ = work.produce(["a"])
    assert (FDS / str(fd)).readlink().is_relative_to(work.path)
    os.close(fd)


def test_a_directory_deeper_than_the_recursion_of_python_is_removed() -> None:
    # PERF: other file systems take milliseconds to remove a folder.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        work = WorkDir(Path(root) / "work", shared=False)
        above = os.open(work.path, os.O_RDONLY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=above)
            inner = os.open("d", os.O_RDONLY, dir_fd=above)
            os.close(above)
            above = inner
        os.close(above)
        work.close()
        assert not work.path.exists()


def test_closing_removes_the_directory_and_nothing_behind_links(work: WorkDir, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept.txt").write_text("kept")
    (work.path / "link").symlink_to(tmp_path / "outside")
    work.close()
    assert not work.path.exists()
    assert (tmp_path / "outside" / "kept.txt").read_text() == "kept"


def test_a_shared_directory_stays(tmp_path: Path) -> None:
    shared = WorkDir(tmp_path, shared=True)
    shared.close()
    assert tmp_path.is_dir()
