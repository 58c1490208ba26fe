"""A process that has imported much, and forks others, which need import nothing more.

An import of torch takes two processor seconds, one of the frontend's modules half a second. A nursery imports once, and
forks as often as it is asked on its socket, by any process that knows the path of the socket:

1. The client sends what to run, as JSON (`Order`), with descriptors: standard output and those the process inherits, or
   all standard streams.
2. The nursery forks. The child takes over arguments, environment and descriptors, leads a session of its own, and runs
   the module as `python -m` does. The nursery answers with the pid.
3. When the child has ended, the nursery answers with its exit code, and counts its processor time among its own.

A nursery ends when its standard input does, with the process that has started it. What still runs then is killed, and
the arenas of these servers go, as nobody else is left who would remove them. `Forked` is the client of one process,
with the methods of `subprocess.Popen`.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ipc.processes.liveness import is_held

MAX_ORDER_BYTES = 1 << 17
MAX_DESCRIPTORS = 8
KILLED_S = 20.0
"""How long a killed process may take to let its arenas go."""
LIFE = "--life-fd"
"""The argument in front of the number of an inherited descriptor."""


@dataclass
class Order:
    """What a child does: run `module`, or else `program`, which is Python source."""

    environment: dict[str, str]
    arguments: list[str]
    cwd: str
    module: str = ""
    program: str = ""
    prelude: str = ""
    """A function, as `module:name`, that is called before."""
    mark: str = ""
    """What the process belongs to: `marked` finds all of a mark."""
    has_streams: bool = False
    """The descriptors are standard input, output and error."""


class Forked:
    """A process that a nursery has forked, with the methods of `subprocess.Popen`."""

    def __init__(
        self, nursery: Path | str, order: Order, output: int = 1, inherited: Sequence[int] = ()
    ) -> None:
        """`output` becomes standard output and error; `inherited` are those behind `--life-fd`, in their order.

        Of an order with streams, `output` is standard input, and `inherited` are standard output and error.
        """
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_ORDER_BYTES)
        self._socket.connect(str(nursery))
        socket.send_fds(self._socket, [json.dumps(asdict(order)).encode()], [output, *inherited])
        self.pid = int(self._socket.recv(64) or b"-1")
        if self.pid < 0:
            raise OSError(f"the nursery {nursery} is gone")

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code. Raises `TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked {self.pid}", timeout or 0.0)
            self.returncode = int(self._socket.recv(64) or -signal.SIGKILL)
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def marked(nursery: Path | str, mark: str) -> set[int]:
    """The pids, which are sessions too, of all children that were forked with this mark, dead ones among them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(str(nursery))
        asking.send(json.dumps(mark).encode())
        return set(map(int, asking.recv(MAX_ORDER_BYTES).split()))


class Nursery:
    """The forking process itself: one loop, which never computes."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._clients: dict[int, socket.socket] = {}
        """By descriptor, those that have not sent their order."""
        self._children: dict[int, socket.socket] = {}
        """Who waits for the end of a child, by pid."""
        self._arenas: dict[int, tuple[str, str]] = {}
        """Directory and names of the arenas of a child's server, by the child's pid."""
        self._marked: defaultdict[str, list[int]] = defaultdict(list)
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._poll = select.poll()
        for fd in (sys.stdin.fileno(), self._listener.fileno(), self._woken):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> Callable[[], None] | None:
        """Fork until standard input ends, then None. In a child: what is left to do there."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == sys.stdin.fileno():
                    self._kill_all()
                    return None
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._woken:
                    os.read(fd, 4096)
                    self._reap()
                elif (rest := self._serve(self._clients.pop(fd))) is not None:
                    return rest

    def _accept(self) -> None:
        client = self._listener.accept()[0]
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)

    def _serve(self, client: socket.socket) -> Callable[[], None] | None:
        self._poll.unregister(client)
        message, descriptors, _, _ = socket.recv_fds(client, MAX_ORDER_BYTES, MAX_DESCRIPTORS)
        asked = json.loads(message) if message else ""
        if isinstance(asked, str):
            _tell(client, *self._marked[asked])
            client.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._leave()
            client.close()
            return lambda: _become(Order(**asked), descriptors)
        for fd in descriptors:
            os.close(fd)
        self._children[pid] = client
        self._arenas[pid] = _arenas_of(asked["environment"])
        self._marked[asked["mark"]].append(pid)
        _tell(client, pid)
        return None

    def _leave(self) -> None:
        """A child holds nothing of the nursery."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for held in (self._listener, *self._clients.values(), *self._children.values()):
            held.close()
        os.close(self._woken)
        os.close(self._wake)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                client = self._children.pop(ended[0])
                del self._arenas[ended[0]]
                _tell(client, os.waitstatus_to_exitcode(ended[1]))
                client.close()

    def _kill_all(self) -> None:
        """Kill every child with its session, and remove what their servers leave in shared memory."""
        for pid in self._children:
            # NOTE: a child that was forked just now leads no group yet.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        places, until_s = set(filter(all, self._arenas.values())), time.monotonic() + KILLED_S
        while _unlink_free(places) and time.monotonic() < until_s:
            time.sleep(0.01)


def _arenas_of(environment: Mapping[str, str]) -> tuple[str, str]:
    """Directory of a server's arenas and the pattern of their names, both empty for a process of no server."""
    directory, instance = (environment.get(f"PENSTOCK_RUN__{name}", "") for name in ("SHM_DIR", "INSTANCE"))
    return (directory, f"penstock.{instance}.*") if directory and instance else ("", "")


def _unlink_free(places: set[tuple[str, str]]) -> int:
    """Remove the arenas that no process holds; how many are held."""
    arenas = [arena for directory, pattern in places for arena in Path(directory).glob(pattern)]
    for arena in arenas:
        if not is_held(arena):
            arena.unlink(missing_ok=True)
    return sum(arena.exists() for arena in arenas)


def _tell(client: socket.socket, *numbers: int) -> None:
    """Whoever has asked may be gone."""
    with contextlib.suppress(OSError):
        client.send(" ".join(map(str, numbers)).encode() or b" ")


def _become(order: Order, descriptors: array.array[int]) -> None:
    os.setsid()
    if order.has_streams:
        streams, inherited = descriptors, []
    else:
        output, *inherited = descriptors
        streams = [os.open(os.devnull, os.O_RDONLY), output, output]
    for target, source in enumerate(streams):
        os.dup2(source, target)
    for source in set(streams):
        os.close(source)
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.environment)
    arguments = list(order.arguments)
    for fd in inherited:
        arguments[arguments.index(LIFE) + 1] = str(fd)
    gc.enable()
    if order.prelude:
        module, _, name = order.prelude.partition(":")
        getattr(importlib.import_module(module), name)()
    sys.argv = [order.module or "-c", *arguments]
    if order.module:
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
    else:
        exec(compile(order.program, "<life>", "exec"), {"__name__": "__main__"})


def _end(run: Callable[[], None]) -> None:
    """Run to the end and leave with the code that an interpreter would leave with."""
    code: Any = 0
    try:
        run()
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # PERF: the end of an interpreter frees every module, which touches all that was shared with the nursery.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def start(path: Path, modules: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a nursery with these modules; its socket is there when this returns."""
    command = [sys.executable, "-P", "-m", "tests.harness.nursery", str(path), *modules]
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "a nursery did not start"
    return process


def main(path: str, *modules: str) -> None:
    """Import, then fork."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    nursery = Nursery(path)
    print("ready", flush=True)
    rest = nursery.run()
    if rest is not None:
        _end(rest)
    Path(path).unlink()
    with contextlib.suppress(OSError):
        # The nursery that ends last removes the directory.
        Path(path).parent.rmdir()


if __name__ == "__main__":
    main(*sys.argv[1:])
