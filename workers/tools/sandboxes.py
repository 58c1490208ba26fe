"""Sandboxes by name: the calls of each, its work directory, its interpreter, and its end.

1. `Sandboxes.run` finds or makes the sandbox. Calls of one sandbox take turns.
2. A call runs Python in the interpreter of the sandbox, or a shell in a start of its own. Both see the same work
   directory.
3. The directory is counted while a call runs, at the end of each call, and between calls, as threads of Python go on.
   Too many bytes or files cost the sandbox its processes and its files. `Sandboxes.guard` watches the free space of
   the disk, which files that are deleted and held open take as well.
4. Files that the call has changed are copied and handed out.
5. A sandbox ends by name, with its connection, or after `agent.idle_s` without a call. Its processes are killed, then
   the work directory is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Hashable
from pathlib import Path
from typing import NamedTuple, TypeVar

from ipc.settings import Agent
from ipc.wire.tools import (
    Produced,
    PythonCall,
    PythonResult,
    ResetCall,
    ResetResult,
    Result,
    SandboxCall,
    ShellCall,
    ShellResult,
    SurfaceResult,
    close_all,
)
from workers.tools.cgroups import Group
from workers.tools.files import Refused, Snapshot, WorkDir, changed, excess
from workers.tools.interpreter import Interpreter
from workers.tools.layers import Layers
from workers.tools.processes import Broken, Process, unbroken, written_nbytes

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_EVERY_S = 0.5
"""Pause between two looks at the work directory of a running call, and at the free space of the disk."""
_LOOKING_SHARE = 10
"""PERF: a pause is at least so many times as long as the look before."""
GUARD_ROUNDS = 10
"""Looks at the disk for one look at the directories of sandboxes without a call."""
MAX_COMMAND_NBYTES = 100 << 10
"""Longest text of a shell; the kernel takes 128 KiB."""
MAX_SHELL_CHARS = 1 << 20
_QUICK_ENTRIES = 200
"""PERF: so many entries are looked at on the event loop, more of them in a thread."""
_NOTHING = Snapshot({}, 0, "")


class Outcome(NamedTuple):
    """The end of a call. The receiver owns the descriptors, one for each of `produced` without error."""

    result: Result
    produced: list[Produced]
    fds: list[int]
    left: int


async def _in_thread(
    function: Callable[..., T], *args: object, discard: Callable[[T], None] = lambda _: None
) -> T:
    """Run in a thread. A cancelled caller waits for the thread, as the next one uses the same descriptors.

    `discard` frees a result that nobody takes.
    """
    return await unbroken(asyncio.to_thread(function, *args), discard)


class Sandbox:
    """One sandbox, with its work directory from the first call or file on."""

    def __init__(self, layers: Layers, directory: WorkDir, group: Group | None = None) -> None:
        self._layers, self._dir, self._group = layers, directory, group
        self._interpreter: Interpreter | None = None
        self._shell_at_work: Process | None = None
        self._next_shell: Process | None = None
        self._before = _NOTHING
        self._failed_files = self._stopped = ""
        self._is_seen = True
        self._turn = asyncio.Lock()
        self.used_at = time.monotonic()
        self.users = 0
        """Calls and copies that run or wait."""

    @contextlib.asynccontextmanager
    async def turn(self, used: bool = True) -> AsyncIterator[None]:
        """Wait for the calls before this one. Without `used` the sandbox stays as idle as it was."""
        self.users += 1
        try:
            async with self._turn:
                yield
        finally:
            self.users -= 1
            self.used_at = time.monotonic() if used else self.used_at

    async def put(self, fd: int, path: str) -> None:
        """Copy a file into the work directory; a failure is told by the next call."""
        limit = self._layers.config.max_workdir_bytes
        try:
            if self._before.used_nbytes + os.fstat(fd).st_size > limit:
                raise OSError(0, f"more than agent.max_workdir_bytes, {limit}, in the work directory")
            await _in_thread(self._dir.put, fd, path)
        except (OSError, Refused) as error:
            reason = getattr(error, "strerror", None) or "no plain relative path to a file"
            log.warning("a file could not be put into a sandbox: %s", reason)
            self._failed_files = f"the file {path[:200]!r} could not be put into the sandbox: {reason}"
        self._before = await self._look()

    async def run(self, call: SandboxCall) -> Outcome:
        """Run a call in its turn. Raises `Broken`."""
        await self._require_fit()
        if self._failed_files:
            failed, self._failed_files = self._failed_files, ""
            raise Broken(failed)
        if isinstance(call, ResetCall):
            await self._end_interpreter()
            return Outcome(ResetResult("success"), [], [], 0)
        result: Result = SurfaceResult("success")
        if isinstance(call, PythonCall | ShellCall):
            self._is_seen = False
            try:
                result = await self._watched(call)
            except Broken:
                await self._require_fit()
                raise
        after = await self._look()
        if not self._stopped:
            self._judge(after)
        await self._require_fit()
        self._is_seen = True
        paths = changed(self._before, after, call.outputs)
        self._before = after
        if not paths:
            return Outcome(result, [], [], 0)
        return Outcome(
            result, *await _in_thread(self._dir.produce, paths, discard=lambda found: close_all(found[1]))
        )

    async def _look(self) -> Snapshot:
        quick = self._dir.look(min(_QUICK_ENTRIES, self._layers.config.max_workdir_files))
        return await self._slow_look() if quick.unseen else quick

    async def _slow_look(self) -> Snapshot:
        return await _in_thread(self._dir.look, self._layers.config.max_workdir_files)

    def _judge(self, seen: Snapshot) -> None:
        """Stop the sandbox if the work directory takes more than the settings allow, or cannot be counted."""
        if full := excess(seen, self._layers.config.max_workdir_bytes):
            self.stop(f"the work directory {full}")

    def stop(self, reason: str) -> None:
        """Kill all processes. The files are removed before the next step, and one call is told the reason."""
        log.warning("a sandbox is stopped: %s", reason)
        self._stopped = reason
        for process in self._processes():
            process.kill()

    async def _require_fit(self) -> None:
        """End a sandbox that was stopped, and raise `Broken` with the reason."""
        if self._stopped:
            reason = self._stopped
            await unbroken(self._clear())
            files_after = "its files stay" if self._dir.shared else "its files are removed"
            raise Broken(f"{reason}; the processes of the sandbox are ended, {files_after}")

    async def _clear(self) -> None:
        await self._end_processes()
        try:
            await _in_thread(self._dir.empty)
        except OSError as error:
            log.warning("a work directory could not be emptied: %s", error.strerror)
        self._before, self._is_seen, self._stopped = _NOTHING, True, ""

    def _processes(self) -> list[Process]:
        python = None if self._interpreter is None else self._interpreter.process
        return [each for each in (self._shell_at_work, self._next_shell, python) if each is not None]

    @property
    def is_busy(self) -> bool:
        """Whether code of a model may write between calls: an interpreter is alive."""
        return self._interpreter is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the sandbox was stopped, and its files are not yet removed."""
        return bool(self._stopped)

    @property
    def written_nbytes(self) -> int:
        """Bytes that the work directory took at the last look, and that processes have written."""
        written = sum(written_nbytes(each.pid) for each in self._processes() if not each.ended.done())
        return self._before.used_nbytes + written

    async def check(self) -> None:
        """Count the work directory of a sandbox without a call; the next call is told the reason of a stop."""
        is_quiet = self._is_seen and not self.is_busy and not self._stopped
        if self.users or is_quiet:
            return
        async with self.turn(used=False):
            if not self._stopped:
                self._judge(await self._look())
            self._is_seen = True
            try:
                await self._require_fit()
            except Broken as error:
                self._failed_files = str(error)

    async def _watched(self, call: PythonCall | ShellCall) -> Result:
        """Run a call, and stop the sandbox if the work directory outgrows its limits."""
        task: asyncio.Task[PythonResult] | asyncio.Task[ShellResult]
        loop = asyncio.get_running_loop()
        if isinstance(call, PythonCall):
            task = loop.create_task(self._python(call))
        else:
            task = loop.create_task(self._shell(call))
        pause_s = LOOK_EVERY_S
        try:
            while True:
                await asyncio.wait([task], timeout=pause_s)
                if task.done():
                    return task.result()
                began = time.perf_counter()
                self._judge(await self._slow_look())
                pause_s = max(LOOK_EVERY_S, _LOOKING_SHARE * (time.perf_counter() - began))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _python(self, call: PythonCall) -> PythonResult:
        if self._interpreter is not None and not self._interpreter.alive:
            await self._end_interpreter()
        if self._interpreter is None:
            self._interpreter = await Interpreter.start(
                self._layers, self._dir.path, call.timeout_s, self._group
            )
        return await self._interpreter.run(call.code, call.timeout_s)

    async def _shell(self, call: ShellCall) -> ShellResult:
        command = "\n".join(call.commands).encode("utf-8", "replace")
        seen = self._layers.seen(self._dir.path)
        if len(command) > MAX_COMMAND_NBYTES or b"\0" in command:
            message = f"the commands must have no NUL and at most {MAX_COMMAND_NBYTES} bytes"
            return ShellResult("error", seen, stderr=message, exit_code=126)
        chars = max(0, min(call.max_chars, MAX_SHELL_CHARS))
        process, self._next_shell = self._next_shell, None
        if process is None or process.ended.done():
            process = self._start_shell()
        self._shell_at_work = process
        process.stdout.limit = process.stderr.limit = 4 * chars
        try:
            with contextlib.suppress(OSError):
                request = len(command).to_bytes(4, "little") + command
                await asyncio.get_running_loop().sock_sendall(process.channel, request)
            await asyncio.wait([process.ended], timeout=call.timeout_s)
            timed_out = not process.ended.done()
            process.kill()
            await asyncio.wait([process.ended])
            stdout, stderr = process.stdout.take(chars), process.stderr.take(chars)
            require_start(process, stderr, "the shell")
        finally:
            await process.end()
            self._shell_at_work = None
        with contextlib.suppress(Broken):
            # The next call tells of a start that fails: the present call has its result.
            self._next_shell = self._start_shell()
        return _shell_result(seen, process.ended.result(), stdout, stderr, timed_out)

    def _start_shell(self) -> Process:
        """A shell that waits for its command.

        PERF: the next call finds a shell that has started, as the start takes longer than most commands.
        """
        config = self._layers.config
        more = (config.shell_path,)
        return Process(
            self._layers,
            self._dir.path,
            "shell",
            config.shell_timeout_s,
            more,
            4 * MAX_SHELL_CHARS,
            self._group,
        )

    async def _end_processes(self) -> None:
        await self._end_interpreter()
        shell, self._next_shell = self._next_shell, None
        if shell is not None:
            await shell.end()

    async def _end_interpreter(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.end()

    async def end(self) -> None:
        """End the processes and remove the work directory, after the calls that came before."""
        await unbroken(self._end())

    async def _end(self) -> None:
        async with self.turn():
            await self._end_processes()
            if self._group is not None:
                await self._group.end()
            await _in_thread(self._dir.close)


def _shell_result(seen: str, code: int, stdout: str, stderr: str, timed_out: bool) -> ShellResult:
    if timed_out:
        return ShellResult("timeout", seen, stdout, stderr, None, timed_out=True)
    # A shell that a signal ended tells so by its exit code, as one shell tells another.
    code = 128 - code if code < 0 else code
    return ShellResult("error" if code else "success", seen, stdout, stderr, code)


def require_start(process: Process, stderr: str, what: str) -> None:
    """Raise `Broken` if the program `what` has not begun: our program says so before the other replaces it."""
    try:
        frames = process.channel.recv(4096)
    except OSError:
        frames = b""
    ready, failure = frames[:5], frames[5:]
    if ready[4:] != b"R":
        reason = stderr[:300].strip() or frames[9:300].decode("utf-8", "replace")
        raise Broken(f"the sandbox cannot be started: {reason}")
    if failure:
        raise Broken(f"{what} cannot be started: {failure[9:300].decode('utf-8', 'replace')}")


class Sandboxes:
    """All sandboxes of the host."""

    def __init__(self, config: Agent, layers: Layers, root: Path) -> None:
        """Work directories are made below `root`, or are the one that `agent.workdir` names."""
        self._config, self._layers, self._root = config, layers, root
        self._found: dict[tuple[Hashable, str], Sandbox] = {}
        self._disk = Path(config.workdir) if config.workdir else root
        self._order = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._found)

    async def get(self, owner: Hashable, name: str) -> Sandbox:
        """The sandbox of a name; `owner` is None for a lasting one, else the connection. Raises `Broken`.

        Callers get their sandboxes in the order of their calls.
        """
        async with self._order:
            sandbox = self._found.get((owner, name))
            if sandbox is None:
                await self._make_room()
                sandbox = self._found[owner, name] = self._made()
            return sandbox

    def _made(self) -> Sandbox:
        directory, groups = self._directory(), self._layers.groups
        try:
            group = None if groups is None else groups.make()
        except OSError as error:
            directory.close()
            raise Broken(f"the control group cannot be made: {error.strerror}") from error
        return Sandbox(self._layers, directory, group)

    def _directory(self) -> WorkDir:
        try:
            if self._config.workdir:
                return WorkDir(Path(self._config.workdir), shared=True)
            return WorkDir(self._root / secrets.token_hex(12), shared=False)
        except OSError as error:
            raise Broken(f"the work directory cannot be made: {error.strerror}") from error

    def require_disk(self) -> None:
        """Raise `Broken` if the disk of the work directories is almost full."""
        try:
            disk = os.statvfs(self._disk)
        except FileNotFoundError:
            # The first sandbox makes `agent.workdir`.
            return
        free, least = disk.f_bavail * disk.f_frsize, self._config.min_free_disk_bytes
        if free < least:
            raise Broken(
                f"the disk of the work directories has {free} bytes free, agent.min_free_disk_bytes asks for {least}"
            )

    async def guard(self) -> None:
        """Watch the disk for ever, and from time to time the sandboxes without a call."""
        for number in itertools.count():
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self.keep_free()
                if number % GUARD_ROUNDS == 0:
                    await self.check_all()
            except OSError as error:
                log.warning("the work directories cannot be watched: %s", error.strerror)

    async def check_all(self) -> None:
        """Count the work directories of the sandboxes without a call."""
        for key, sandbox in list(self._found.items()):
            # A sandbox may end while another one is counted, and other files then have its descriptors.
            if self._found.get(key) is sandbox:
                await sandbox.check()

    async def keep_free(self) -> None:
        """Stop the sandbox that has written most if the disk is almost full; the next one if that gave too little."""
        try:
            self.require_disk()
        except Broken as error:
            if any(each.is_stopped for each in self._found.values()):
                return
            written = {each: each.written_nbytes for each in self._found.values()}
            most = max(written, key=written.__getitem__, default=None)
            if most is not None and written[most]:
                most.stop(str(error))
                await most.check()

    async def _make_room(self) -> None:
        """End the sandbox that was idle for longest if there are too many. Raises `Broken` if all are in use."""
        while len(self._found) >= self._config.max_sandboxes:
            idle = [key for key, each in self._found.items() if key[0] is None and not each.users]
            if not idle:
                raise Broken(f"all {self._config.max_sandboxes} sandboxes are in use; try again later")
            await self._end(min(idle, key=lambda key: self._found[key].used_at))

    async def end(self, owner: Hashable, name: str) -> None:
        """End the sandbox of a name, if there is one, after its calls."""
        async with self._order:
            sandbox = self._found.pop((owner, name), None)
        if sandbox is not None:
            await sandbox.end()

    async def end_all(self, owner: Hashable) -> None:
        """End all sandboxes of a connection."""
        for key in [key for key in self._found if key[0] is owner]:
            await self._end(key)

    async def end_idle(self) -> None:
        """End lasting sandboxes that were idle for too long."""
        limit = time.monotonic() - self._config.idle_s
        for key, sandbox in list(self._found.items()):
            idle = not sandbox.users and sandbox.used_at < limit
            if key[0] is None and idle and self._found.get(key) is sandbox:
                await self._end(key)

    async def close(self) -> None:
        """End all."""
        for key in list(self._found):
            await self._end(key)

    async def _end(self, key: tuple[Hashable, str]) -> None:
        sandbox = self._found.pop(key, None)
        if sandbox is not None:
            await sandbox.end()
