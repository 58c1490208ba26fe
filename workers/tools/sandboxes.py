"""Sandboxes by name: the calls of each, its work directory, its interpreter, and its end.

1. `Sandboxes.run` finds or makes the sandbox. Calls of one sandbox take turns.
2. A call runs Python in the interpreter of the sandbox, or a shell in a start of its own. Both see the same work
   directory. While a call runs, the disk space of the directory is watched.
3. Files that the call has changed are copied and handed out.
4. A sandbox ends by name, with its connection, or after `agent.idle_s` without a call. Its processes are killed, then
   the work directory is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Hashable
from pathlib import Path
from typing import NamedTuple, TypeVar

from ipc.settings import Agent
from ipc.wire.tools import (
    Call,
    Produced,
    PythonCall,
    PythonResult,
    ResetCall,
    ResetResult,
    Result,
    ShellCall,
    ShellResult,
    SurfaceResult,
    close_all,
)
from workers.tools.files import MAX_DEPTH, MAX_ENTRIES, Refused, Snapshot, WorkDir, changed
from workers.tools.interpreter import Interpreter
from workers.tools.layers import Layers
from workers.tools.processes import Broken, Process, unbroken

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_EVERY_S = 0.5
"""Pause between two looks at the disk space of a running call."""
MAX_COMMAND_NBYTES = 100 << 10
"""Longest text of a shell; the kernel takes 128 KiB."""
MAX_SHELL_CHARS = 1 << 20
_QUICK_ENTRIES = 200
"""PERF: so many entries are looked at on the event loop, more of them in a thread."""
_NOTHING = Snapshot({}, 0, True)


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

    def __init__(self, layers: Layers, directory: WorkDir) -> None:
        self._layers, self._dir = layers, directory
        self._interpreter: Interpreter | None = None
        self._next_shell: Process | None = None
        self._before = _NOTHING
        self._failed_files = ""
        self._turn = asyncio.Lock()
        self.used_at = time.monotonic()
        self.users = 0
        """Calls and copies that run or wait."""

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the calls before this one."""
        self.users += 1
        try:
            async with self._turn:
                yield
        finally:
            self.users -= 1
            self.used_at = time.monotonic()

    async def put(self, fd: int, path: str) -> None:
        """Copy a file into the work directory; a failure is told by the next call."""
        try:
            await _in_thread(self._dir.put, fd, path)
        except (OSError, Refused) as error:
            reason = getattr(error, "strerror", None) or "no plain relative path to a file"
            log.warning("a file could not be put into a sandbox: %s", reason)
            self._failed_files = f"the file {path[:200]!r} could not be put into the sandbox: {reason}"
        self._before = await self._look()

    async def run(self, call: Call) -> Outcome:
        """Run a call in its turn. Raises `Broken`."""
        if self._failed_files:
            failed, self._failed_files = self._failed_files, ""
            raise Broken(failed)
        if isinstance(call, ResetCall):
            await self._end_interpreter()
            return Outcome(ResetResult("success"), [], [], 0)
        result: Result = SurfaceResult("success")
        if isinstance(call, PythonCall | ShellCall):
            result = await self._watched(call)
        after = await self._look()
        paths = changed(self._before, after, call.outputs)
        self._before = after
        if not paths:
            return Outcome(result, [], [], 0)
        return Outcome(
            result, *await _in_thread(self._dir.produce, paths, discard=lambda found: close_all(found[1]))
        )

    async def _look(self) -> Snapshot:
        quick = self._dir.look(_QUICK_ENTRIES)
        return quick if quick.complete else await _in_thread(self._dir.look)

    async def _watched(self, call: PythonCall | ShellCall) -> Result:
        """Run a call, and end its processes if the work directory outgrows its limit."""
        task: asyncio.Task[PythonResult] | asyncio.Task[ShellResult]
        loop = asyncio.get_running_loop()
        if isinstance(call, PythonCall):
            task = loop.create_task(self._python(call))
        else:
            task = loop.create_task(self._shell(call))
        limit = self._layers.config.max_workdir_bytes
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_EVERY_S)
                if not task.done():
                    self._require_room(await _in_thread(self._dir.look), limit)
            return task.result()
        except (asyncio.CancelledError, Broken) as error:
            task.cancel()
            await asyncio.wait([task])
            if isinstance(error, Broken):
                await self._end_interpreter()
            raise

    def _require_room(self, seen: Snapshot, limit: int) -> None:
        """Raise `Broken` if the work directory takes more than `limit` bytes, or has more than can be counted."""
        if seen.used_nbytes > limit:
            raise Broken(f"the work directory takes {seen.used_nbytes} bytes, {limit} are allowed")
        if not seen.complete:
            raise Broken(
                f"the work directory has over {MAX_ENTRIES} entries, {MAX_DEPTH} levels, or folders that are closed"
            )

    async def _python(self, call: PythonCall) -> PythonResult:
        if self._interpreter is not None and not self._interpreter.alive:
            await self._end_interpreter()
        if self._interpreter is None:
            self._interpreter = await Interpreter.start(self._layers, self._dir.path, call.timeout_s)
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
            _require_start(process, stderr)
        finally:
            await process.end()
        with contextlib.suppress(Broken):
            # A start that fails is the next call's to tell; this one has its result.
            self._next_shell = self._start_shell()
        return _shell_result(seen, process.ended.result(), stdout, stderr, timed_out)

    def _start_shell(self) -> Process:
        """A shell that waits for its command.

        PERF: the next call finds a shell that has started, as the start takes longer than most commands.
        """
        config = self._layers.config
        more = (config.shell_path,)
        return Process(
            self._layers, self._dir.path, "shell", config.shell_timeout_s, more, 4 * MAX_SHELL_CHARS
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
            await _in_thread(self._dir.close)


def _shell_result(seen: str, code: int, stdout: str, stderr: str, timed_out: bool) -> ShellResult:
    if timed_out:
        return ShellResult("timeout", seen, stdout, stderr, None, timed_out=True)
    # A shell that a signal ended tells so by its exit code, as one shell tells another.
    code = 128 - code if code < 0 else code
    return ShellResult("error" if code else "success", seen, stdout, stderr, code)


def _require_start(process: Process, stderr: str) -> None:
    """Raise `Broken` if the shell has not begun: our program says so before the shell replaces it."""
    try:
        frames = process.channel.recv(4096)
    except OSError:
        frames = b""
    ready, failure = frames[:5], frames[5:]
    if ready[4:] != b"R":
        reason = stderr[:300].strip() or frames[9:300].decode("utf-8", "replace")
        raise Broken(f"the sandbox cannot be started: {reason}")
    if failure:
        raise Broken(f"the shell cannot be started: {failure[9:300].decode('utf-8', 'replace')}")


class Sandboxes:
    """All sandboxes of the host."""

    def __init__(self, config: Agent, layers: Layers, root: Path) -> None:
        """Work directories are made below `root`, or are the one that `agent.workdir` names."""
        self._config, self._layers, self._root = config, layers, root
        self._found: dict[tuple[Hashable, str], Sandbox] = {}
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
                sandbox = self._found[owner, name] = Sandbox(self._layers, self._directory())
            return sandbox

    def _directory(self) -> WorkDir:
        try:
            if self._config.workdir:
                return WorkDir(Path(self._config.workdir), shared=True)
            return WorkDir(self._root / secrets.token_hex(12), shared=False)
        except OSError as error:
            raise Broken(f"the work directory cannot be made: {error.strerror}") from error

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
