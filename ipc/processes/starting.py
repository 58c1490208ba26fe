"""Our own processes: starting one, importing large libraries, the title in `ps`, and the report that one is ready.

Modules come from this installation and its libraries, never from the current directory (`-P`), which may hold a
`workers.py` or a `frontend/` of its own. docs/adr/0026 has the reasons.

Readiness goes by the sd_notify datagram protocol. Processes report (`Notifier`), systemd or the embedded supervisor
listens (`Listener`). Fields: READY=1, STOPPING=1, STATUS=text, WATCHDOG=1.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
"""The directory with `frontend`, `ipc`, `workers` and `penstock`: the source tree, or a folder of the installation."""

_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Makes setproctitle keep the environment in /proc/PID/environ, which a title would overwrite."""
GC_THRESHOLDS = 10_000, 20, 20
ENDED_BY = "WORKER_ENDED_BY"
"""Variable in which the supervisor tells a worker how the earlier life of its slot ended: `signal-9`, `exit-70`, ..."""
_imports_lock = threading.Lock()
_found_enabled: list[bool] = []
"""Whether the collector was on, for each import under way. The last import to end restores what the first one found."""


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def ended_by() -> str:
    """How the earlier life of this worker's slot ended, in the supervisor's words; "" for none and without one."""
    return os.environ.get(ENDED_BY, "")


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """`given`, or this process's environment, changed so that a child imports our modules and none by its directory."""
    variables = dict(os.environ if given is None else given)
    places = [part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(TOP)]
    return variables | {
        "PYTHONPATH": os.pathsep.join([str(TOP), *places]),
        "PYTHONSAFEPATH": "1",
        _KEEP_ENVIRONMENT: "1",
    }


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import large libraries in this block; the cyclic garbage collector rests. Thread-safe.

    PERF: modules are never garbage. The collector would look at them again and again while they are made, which is a
    fifth of the processor time of an import of torch and transformers.
    """
    with _imports_lock:
        _found_enabled.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _imports_lock:
            enabled = _found_enabled.pop()
            if enabled and not _found_enabled:
                gc.enable()


def title(text: str) -> None:
    """Show `penstock: text` in `ps` in place of the command line, if setproctitle is installed."""
    os.environ.setdefault(_KEEP_ENVIRONMENT, "1")
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(f"penstock: {text}")


_BEHIND = (errno.EAGAIN, errno.ENOBUFS)


def collect_seldom() -> None:
    """Have the collector look at new objects only, and seldom, in a process that has started and serves requests."""
    # PERF: modules and the application are never garbage, and nearly all objects of a request end without the
    # collector.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class Notifier:
    """Sends fields to the socket in `address` (`$NOTIFY_SOCKET` unless given); silent when there is none."""

    def __init__(self, address: str | None = None) -> None:
        self.address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._socket = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if self.address else None
        )
        if self._socket is not None:
            self._socket.setblocking(False)

    def send(self, **fields: str | int) -> bool:
        """Send upper-cased fields, for example `send(ready=1, status="2 models loaded")`. Never raises or waits.

        False when the listener is behind and the fields are lost: send again what must arrive. True when the listener
        is gone.
        """
        if self._socket is None:
            return True
        target = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            self._socket.sendto("\n".join(f"{k.upper()}={v}" for k, v in fields.items()).encode(), target)
        except OSError as error:
            return error.errno not in _BEHIND
        return True


class Listener:
    """Bound datagram socket of one child."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Descriptor to poll."""
        return self._socket.fileno()

    def receive(self) -> dict[str, str]:
        """All fields that have arrived; a later value replaces an earlier one."""
        fields: dict[str, str] = {}
        while True:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return fields
            for line in data.decode("utf-8", "replace").splitlines():
                name, _, value = line.partition("=")
                fields[name] = value

    def close(self) -> None:
        """Close and remove the socket."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
