"""Tells living processes from dead ones: slot locks, process descriptors, start times, life pipes.

- `SlotLock`: an flock that the kernel drops when its holder dies, SIGKILL included; `take_slot` outwaits a sweep.
- `lock_on`: an flock around one change of shared state, awaited without blocking the event loop.
- `open_pidfd`: a descriptor that becomes readable when the process dies, checked against its start time so that a
  recycled pid is never taken for the old process.
- `lasting_thread`: a thread that lives as long as its process. Its end is the first that others may see of a death: the
  process ends only when the kernel has taken all of its memory back, for gigabytes of a model a second or more later.
- `own_identity`: a process that other processes can ask after, by pid, start time and boot.
- `kill_sandboxes`: ends what a dead tool host may have left.
- `life_pipe`: EOF on the read end comes exactly when every holder of the write end is gone.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ipc import deadline
from ipc.errors import PenstockError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PIDFD_THREAD = os.O_EXCL
"""The flag of pidfd_open(2) for a thread."""
_lasting = 0, 0
"""The process and the id of its lasting thread."""
LOOK_EVERY_S = 0.02
"""Pause between two tries of a lock that another process holds."""
SLOT_WAIT_S = 2.0
"""How long a process that starts waits for the lock of its slot."""


class SlotTaken(PenstockError):
    """Another live process holds the lock of this slot."""


class SlotLock:
    """Exclusive lock on `path`, held until `release` or the death of this process. The file holds the owner's pid."""

    def __init__(self, path: Path) -> None:
        """Take the lock at once or raise `SlotTaken`."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise SlotTaken(f"{path.name} is held by another live process{_holder(path)}") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Give the slot back; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SlotLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(path: Path) -> str:
    """` (pid 4711, since 2026-11-22 21:10:05)` of the lock file at `path`, or empty."""
    try:
        pid, since = path.read_text().strip(), time.localtime(path.stat().st_mtime)
    except OSError:
        return ""
    return f" (pid {pid}, since {time.strftime('%Y-%m-%d %H:%M:%S', since)})" if pid else ""


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock at `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # NOTE: shared, so that two processes that look at the same instant do not take each other for the holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@asynccontextmanager
async def lock_on(path: Path, until_ns: int, where: str) -> AsyncIterator[None]:
    """Hold the lock at `path` inside the context. A holder that stands still delays the waiters of this lock only.

    Raises `DeadlineExceeded` that names the stage `where`, and `OSError`.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not is_taken(lock):
            deadline.check(until_ns, where)
            await asyncio.sleep(LOOK_EVERY_S)
        yield
    finally:
        os.close(lock)


def is_taken(lock: int) -> bool:
    """Try to take the lock of the open file or directory `lock`; returns whether the caller holds the lock now."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_of(lock: int) -> str:
    """Who holds the lock of the open file or directory `lock`, with the state that the kernel tells.

    "another process" where the kernel does not tell, as of a process outside of this container.
    """
    status = os.fstat(lock)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            match line.split():
                case [_, "FLOCK", _, _, pid, locked, *_] if locked == place:
                    state = Path(f"/proc/{pid}/status").read_text().partition("State:")[2].split("\n")[0]
                    return f"process {pid} ({state.split(maxsplit=1)[-1].strip('()')})"
    except (OSError, IndexError):
        pass
    return "another process"


def take_slot(path: Path) -> SlotLock:
    """The lock at `path`; a sweep may hold the lock for a moment. Raises `SlotTaken` when another process has it."""
    until = time.monotonic() + SLOT_WAIT_S
    while True:
        try:
            return SlotLock(path)
        except SlotTaken:
            if time.monotonic() > until:
                raise
            time.sleep(LOOK_EVERY_S)


def lowest_free_slot(directory: Path, prefix: str, limit: int = 256) -> tuple[int, SlotLock]:
    """Take the lowest free slot number below `limit` under `directory`."""
    for slot in range(limit):
        try:
            return slot, SlotLock(directory / f"{prefix}-{slot}.lock")
        except SlotTaken:
            continue
    raise SlotTaken(f"all {limit} {prefix} slots are taken")


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of /proc/<pid>/stat); 0 when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[19])


def processor_ticks(pid: int) -> int:
    """Processor time that all threads of a process have used, in clock ticks; 0 when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return sum(map(int, stat.rpartition(b")")[2].split()[11:13]))


def waits_for_machine(pid: int) -> bool:
    """Whether a thread of a process runs, waits for a processor, or waits for a page or a disk.

    False for a process that is stopped, that waits for itself or for others, or that is gone.
    """
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if stat.read_bytes().rpartition(b") ")[2][:1] in (b"R", b"D"):
                return True
        except OSError:
            continue
    return False


def own_identity() -> str:
    """Tells this process from all others of this host, also from those before the last boot."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> str:
    """The `own_identity` of a process that is there."""
    return f"{_boot()} {pid} {start_ticks(pid)}"


def is_running(identity: str) -> bool:
    """Whether the process that gave this `own_identity` still runs."""
    boot, _, process = identity.partition(" ")
    pid, _, ticks = process.partition(" ")
    return boot == _boot() and pid.isdigit() and ticks != "0" and ticks == str(start_ticks(int(pid)))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def age_ns(pid: int) -> int:
    """Nanoseconds since a process began, in steps of a clock tick; 0 when the process is gone."""
    ticks = start_ticks(pid)
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // _TICKS_PER_S if ticks else 0


def lasting_thread() -> int:
    """Id of the thread of this process that lasts; started by the first call, and anew after a fork."""
    global _lasting
    if _lasting[0] != os.getpid():
        thread = threading.Thread(target=threading.Event().wait, name="lasting", daemon=True)
        thread.start()
        assert thread.native_id is not None
        _lasting = os.getpid(), thread.native_id
    return _lasting[1]


def open_pidfd(pid: int, ticks: int, thread: int = 0) -> int:
    """Descriptor that becomes readable when `pid` (started at `ticks`) dies. Raises `ProcessLookupError`.

    With its lasting `thread` the descriptor becomes readable as soon as the kernel has stopped the process, on Linux
    6.9 and later.
    """
    fd = _thread_pidfd(pid, thread) if thread else os.pidfd_open(pid)
    if ticks and start_ticks(pid) != ticks:
        os.close(fd)
        raise ProcessLookupError(pid)
    return fd


def _thread_pidfd(pid: int, thread: int) -> int:
    """Descriptor of a thread, or of its process where the kernel has none for threads."""
    place = Path(f"/proc/{pid}/task/{thread}")
    if place.exists():
        try:
            fd = os.pidfd_open(thread, _PIDFD_THREAD)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise ProcessLookupError(pid) from None
            # An older kernel says EINVAL, a filter of system calls what it likes.
        else:
            # NOTE: nobody may have reaped the process yet, while its thread has gone and left its id to another one.
            if place.exists():
                return fd
            os.close(fd)
            raise ProcessLookupError(pid)
    return os.pidfd_open(pid)


def kill_sandboxes(work: Path) -> None:
    """Kill each bubblewrap that a dead tool host started with a directory below `work`, the host's work directory.

    A kill of the host in the first moments of a start leaves a process that waits for its parent for ever: until the
    namespace is ready the process does not follow the death of its parent. Sandboxes over a directory of the operator
    (`agent.workdir`) are not found.
    """
    below = os.fsencode(work) + b"/"
    for directory in Path("/proc").glob("[1-9]*"):
        try:
            pidfd = os.pidfd_open(int(directory.name))
        except (OSError, ValueError):
            continue
        try:
            program, *words = (directory / "cmdline").read_bytes().split(b"\0")
            if program.rpartition(b"/")[2] == b"bwrap" and any(word.startswith(below) for word in words):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            # The process has ended, or is of another user.
            continue
        finally:
            os.close(pidfd)


def life_pipe() -> tuple[int, int]:
    """(read, write) descriptors; the write end is inheritable, the process that must notice gets the read end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    return read, write
