"""Locks and descriptors that tell the living from the dead, with real processes and SIGKILL."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.processes.liveness import (
    SlotLock,
    SlotTaken,
    age_ns,
    is_held,
    lasting_thread,
    life_pipe,
    lowest_free_slot,
    open_pidfd,
    start_ticks,
)

WAIT = "import sys; print('up', flush=True); sys.stdin.read()"
LAST = (
    "import sys; from ipc.processes.liveness import lasting_thread; "
    "assert lasting_thread() == lasting_thread(); print(lasting_thread(), flush=True); sys.stdin.read()"
)
LEAVE = (
    "import sys, threading\n"
    "thread = threading.Thread(target=sys.stdin.buffer.raw.read, args=(1,), daemon=True)\n"
    "thread.start()\n"
    "print(thread.native_id, flush=True)\n"
    "threading.Event().wait()"
)
"""A process with a thread that ends when something is written, and goes on."""
HOLD = (
    f"import pathlib, sys; from ipc.processes.liveness import SlotLock; "
    f"held = SlotLock(pathlib.Path(sys.argv[1])); {WAIT}"
)
RENAME = f"import ctypes; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); {WAIT}"


def child(code: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A Python process that has written its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        cwd=Path(__file__).parents[4],
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL and reap."""
    process.kill()
    process.communicate()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be killed."""
    process = child(WAIT)
    yield process
    end(process)


def is_readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` becomes readable in time."""
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_a_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.lock"
    assert not is_held(path)
    with SlotLock(path):
        assert is_held(path)
        assert int(path.read_text()) == os.getpid()
        with pytest.raises(SlotTaken):
            SlotLock(path)
        assert int(path.read_text()) == os.getpid(), "a refused attempt must not touch the file"
    assert not is_held(path)
    assert path.exists()


def test_looking_at_a_lock_does_not_take_it_away_from_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.lock"
    with SlotLock(path):
        assert all(is_held(path) for _ in range(5))
        with pytest.raises(SlotTaken):
            SlotLock(path)


def test_sigkill_frees_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.lock"
    holder = child(HOLD, str(path))
    assert is_held(path)
    assert int(path.read_text()) == holder.pid
    end(holder)
    assert not is_held(path)
    with SlotLock(path):
        assert int(path.read_text()) == os.getpid()


def test_a_child_process_does_not_inherit_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.lock"
    lock = SlotLock(path)
    bystander = child(WAIT)
    try:
        lock.release()
        assert not is_held(path)
    finally:
        end(bystander)


def test_the_lowest_free_slot_is_taken_and_reused(tmp_path: Path) -> None:
    locks = [lowest_free_slot(tmp_path, "frontend") for _ in range(3)]
    assert [slot for slot, _ in locks] == [0, 1, 2]
    locks[1][1].release()
    again = lowest_free_slot(tmp_path, "frontend")
    assert again[0] == 1
    with pytest.raises(SlotTaken):
        lowest_free_slot(tmp_path, "frontend", limit=3)
    for _, lock in (*locks, again):
        lock.release()


def test_a_pidfd_tells_death_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    fd = open_pidfd(sleeper.pid, start_ticks(sleeper.pid))
    assert not is_readable(fd, 0)
    os.kill(sleeper.pid, signal.SIGKILL)
    assert is_readable(fd, 20)
    os.close(fd)


def started(code: str) -> tuple[subprocess.Popen[bytes], int]:
    """A Python process, and the number that it has written."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def knows_threads() -> bool:
    """Whether the kernel has descriptors of threads."""
    try:
        os.close(os.pidfd_open(os.getpid(), os.O_EXCL))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kernel", ["this", "older"])
def test_a_lasting_thread_tells_the_death_of_its_process(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, thread = started(LAST)
    pidfd_open = os.pidfd_open

    def older(pid: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EINVAL, "no such flag")
        return pidfd_open(pid)

    if kernel == "older":
        monkeypatch.setattr(os, "pidfd_open", older)
    assert thread != process.pid
    fd = open_pidfd(process.pid, start_ticks(process.pid), thread)
    assert not is_readable(fd, 0)
    process.kill()
    assert is_readable(fd, 20)
    os.close(fd)
    process.communicate()


@pytest.mark.skipif(not knows_threads(), reason="descriptors of threads need Linux 6.9")
def test_the_end_of_the_thread_is_told_while_the_process_still_ends() -> None:
    process, thread = started(LEAVE)
    ticks = start_ticks(process.pid)
    fd, whole = open_pidfd(process.pid, ticks, thread), open_pidfd(process.pid, ticks)
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    assert is_readable(fd, 20)
    assert not is_readable(whole, 0)
    os.close(fd)
    os.close(whole)
    end(process)


def test_a_thread_of_another_process_is_not_watched(sleeper: subprocess.Popen[bytes]) -> None:
    fd = open_pidfd(sleeper.pid, start_ticks(sleeper.pid), os.getpid())
    sleeper.kill()
    assert is_readable(fd, 20)
    os.close(fd)


def test_a_thread_whose_id_passes_on_during_the_look_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    process, thread = started(LAST)
    ticks, pidfd_open, given = start_ticks(process.pid), os.pidfd_open, []

    def of_another(pid: int, flags: int = 0) -> int:
        """The process ends, and is not reaped; its thread's id belongs to this process."""
        assert pid == thread
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        given.append(pidfd_open(os.getpid()))
        return given[0]

    monkeypatch.setattr(os, "pidfd_open", of_another)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid, ticks, thread)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given[0])
    process.communicate()


def test_a_forked_process_has_a_lasting_thread_of_its_own() -> None:
    own = lasting_thread()
    assert Path(f"/proc/self/task/{own}").exists() and own != os.getpid()
    code = (
        "import os; from ipc.processes.liveness import lasting_thread; own = lasting_thread(); child = os.fork(); "
        "ok = lasting_thread() != own and os.path.exists(f'/proc/self/task/{lasting_thread()}') if not child else "
        "os.waitpid(child, 0)[1] == 0; os._exit(0 if ok else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_recycled_pid_is_not_taken_for_the_old_process(sleeper: subprocess.Popen[bytes]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ProcessLookupError):
        open_pidfd(sleeper.pid, start_ticks(sleeper.pid) + 1)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_dead_process_has_no_start_time_and_no_pidfd(sleeper: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(sleeper.pid)
    assert ticks > 0
    end(sleeper)
    assert start_ticks(sleeper.pid) == 0
    with pytest.raises(ProcessLookupError):
        open_pidfd(sleeper.pid, ticks)


def test_the_age_of_a_process_grows_and_lies_below_that_of_the_host(sleeper: subprocess.Popen[bytes]) -> None:
    first = age_ns(sleeper.pid)
    assert 0 <= first <= age_ns(sleeper.pid) <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert age_ns(os.getpid()) > first, "the parent began before its child"
    end(sleeper)
    assert age_ns(sleeper.pid) == 0


def test_the_start_time_survives_an_awkward_process_name() -> None:
    process = child(RENAME)
    try:
        assert abs(start_ticks(process.pid) - start_ticks(os.getpid())) < 10**7
        assert start_ticks(process.pid) >= start_ticks(os.getpid())
    finally:
        end(process)


def test_a_life_pipe_ends_only_when_its_last_holder_is_gone() -> None:
    read, write = life_pipe()
    holders = [child(WAIT, pass_fds=(write,)) for _ in range(2)]
    os.close(write)
    end(holders[0])
    assert not is_readable(read, 0.1)
    end(holders[1])
    assert is_readable(read, 1)
    assert os.read(read, 1) == b""
    os.close(read)
