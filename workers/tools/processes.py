"""One process in a sandbox: its start, its output within bounds, its end.

All methods belong to the event loop's thread: bubblewrap kills its sandbox when the thread that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from workers.tools.cgroups import Group
from workers.tools.layers import Layers, environment

T = TypeVar("T")

_READ_NBYTES = 64 << 10
_DRAIN_READS = 64
"""Reads of what a pipe may still hold once its writer has ended; a pipe holds 1 MiB at most."""

_PR_SET_CHILD_SUBREAPER = 36
_MOST_GENERATIONS = 1000


class Broken(Exception):
    """The sandbox could not run what was asked; the text is for the caller."""


async def unbroken(work: Awaitable[T], discard: Callable[[T], None] = lambda _: None) -> T:
    """Do `work` to its end, also for a caller that is cancelled meanwhile; `discard` then frees the result."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            discard(task.result())
        raise


class Output:
    """What a process writes to one pipe: the first `limit` bytes are kept, the rest is read and dropped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.read, self._readable)

    def started(self) -> None:
        """The process has its own copy of the writing end."""
        os.close(self.write)
        self.write = -1

    def _readable(self) -> bool:
        """Read once; False when nothing was there."""
        try:
            data = os.read(self.read, _READ_NBYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self.read)
            return False
        self._kept += data[: max(0, self.limit - len(self._kept))]
        return True

    def take(self, max_chars: int) -> str:
        """What has arrived since the last look, cut to `max_chars` characters."""
        for _ in range(_DRAIN_READS):
            if not self._readable():
                break
        text = self._kept.decode("utf-8", "replace")[:max_chars]
        self._kept.clear()
        return text

    def close(self) -> None:
        """Read nothing more."""
        self._loop.remove_reader(self.read)
        os.close(self.read)
        if self.write >= 0:
            os.close(self.write)


class Process:
    """A started program; `ended` is done with the exit code once the process has ended."""

    def __init__(
        self,
        layers: Layers,
        directory: Path,
        mode: str,
        cpu_s: float,
        more: Sequence[str],
        keep: int,
        group: Group | None = None,
        *,
        streams: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start `mode` of the inner program in `directory` and `group`; each output keeps `keep` bytes.

        `streams` is a descriptor in place of the standard input and output; `variables` are further ones. Raises
        `Broken`.
        """
        self._isolated = layers.isolated
        entry = None if group is None else group.entry
        self.stdout, self.stderr = Output(keep), Output(keep)
        self.channel, far = socket.socketpair()
        self.channel.setblocking(False)
        # The first message of the other side then tells its pid in this namespace.
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            with far:
                self._process = subprocess.Popen(
                    layers.command(directory, far.fileno(), mode, cpu_s, *more, entry=entry),
                    stdin=subprocess.DEVNULL if streams is None else streams,
                    stdout=self.stdout.write if streams is None else streams,
                    stderr=self.stderr.write,
                    pass_fds=(far.fileno(),) if entry is None else (far.fileno(), entry),
                    cwd=directory,
                    env=environment(layers.config, layers.seen(directory)) | dict(variables or {}),
                    start_new_session=True,
                )
            _running.add(self._process.pid)
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._close()
            raise Broken(f"the sandbox cannot be started: {error.strerror}") from error
        self.stdout.started()
        self.stderr.started()
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Process id of the outermost process."""
        return self._process.pid

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if not self._isolated:
            # Before the process is reaped its id cannot belong to another group.
            self.kill()
        _running.discard(self._process.pid)
        self.ended.set_result(self._process.wait())

    def kill(self) -> None:
        """Kill the process; with namespaces every other process of the sandbox ends with it.

        NOTE: the first process of a namespace has a session of its own, and on a busy machine asks to die with
        bubblewrap only after the program has begun. So the first process is killed too. Before there is a session, the
        first process is in the group of bubblewrap.
        """
        if self.ended.done():
            return
        first = _children(self._process.pid) if self._isolated else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in first:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)

    async def end(self) -> None:
        """Kill the process, wait for its end, and close everything. Safe to call twice."""
        if self._pidfd >= 0:
            await unbroken(self._end())

    async def _end(self) -> None:
        self.kill()
        await asyncio.wait([self.ended])
        kill_orphans()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._close()

    def _close(self) -> None:
        self.channel.close()
        self.stdout.close()
        self.stderr.close()


def _children(pid: int) -> list[int]:
    """Descriptors of the children of a process: their ids may belong to others once the process has ended."""
    descriptors = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            descriptors.append(os.pidfd_open(int(child)))
    return descriptors


def written_nbytes(pid: int) -> int:
    """Bytes that a process and all below have written; nothing for those that have ended.

    A file system in memory counts calls of `write` only, a disk pages of files in memory as well.
    """
    written, left = 0, [pid]
    while left:
        each = left.pop()
        place = Path(f"/proc/{each}")
        try:
            fields = dict(line.split(": ") for line in (place / "io").read_text().splitlines())
            children = (place / f"task/{each}/children").read_text().split()
        except OSError:
            continue
        written += max(int(fields["write_bytes"]), int(fields["wchar"]))
        left += map(int, children)
    return written


_running: set[int] = set()
"""Ids of processes that this one has started and not reaped."""


_adopts: list[bool] = []
"""Not empty once this process adopts orphans."""


def adopt_orphans() -> None:
    """Make this process the parent of all orphans below; every child that it has not started itself is killed then.

    With bubblewrap the first process of a killed namespace becomes an orphan. Without, a process that has left its
    process group is found only as an orphan.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _adopts.append(True)


def kill_orphans() -> None:
    """Kill and reap adopted processes. An orphan of another sandbox without a PID namespace ends as well."""
    if not _adopts:
        return
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(_MOST_GENERATIONS):
        orphans = [pid for pid in map(int, children.read_text().split()) if pid not in _running]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
