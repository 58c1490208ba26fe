"""A real Gunicorn with the fake ASGI application, forked with its imports, and raw-socket clients for it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.harness import lives
from tests.harness.accounting import count_server
from tests.harness.nursery import Forked
from tests.harness.server import PATIENCE_S, wait_until

_CONFIG = """
from frontend.arbiter.hooks import heed_signals, take_over
from frontend.server.state import ServerLimits
from frontend.server.drain import SUCCESSION
from frontend.server.serving import PenstockWorker
from tests.fakes.holding import wait_for_end_of

PenstockWorker.limits = ServerLimits(**{limits!r})
bind = "127.0.0.1:0"
wsgi_app = "tests.fakes.asgi_app:app"
worker_class = "frontend.server.serving.PenstockWorker"
control_socket_disable = True
on_starting = lambda server: take_over(server, lambda: {max_draining})
on_reload = lambda server: SUCCESSION.reloading()
def post_fork(server, worker):
    wait_for_end_of({hold!r})
    heed_signals()
errorlog = {log!r}
"""


@dataclass
class Reply:
    """One HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def error_code(self) -> str:
        """The code of an error in the server's own form."""
        return str(self.json["detail"]["code"])


class Client:
    """One connection."""

    def __init__(self, port: int, receive_buffer_nbytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer_nbytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_nbytes)
        self.socket.settimeout(PATIENCE_S)
        self.began = time.monotonic()
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.socket.sendall(data)

    def reply(self) -> Reply:
        """Read one response; raises ConnectionError if the connection ends before it is complete."""
        status_line = self._file.readline()
        if not status_line.endswith(b"\n"):
            raise ConnectionError(f"ended in the status line: {status_line!r}")
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        status = int(status_line.split()[1])
        nbytes = int(headers.get("content-length", "0"))
        body = self._file.read(nbytes)
        if len(body) < nbytes:
            raise ConnectionError(f"ended after {len(body)} of {nbytes} bytes")
        return Reply(status, headers, body)

    def ask(self, target: str = "/echo", body: bytes = b"", fields: str = "") -> Reply:
        """Send one request and read its response."""
        self.send(request(target, body, fields))
        return self.reply()

    def seconds_to_end(self) -> float:
        """Wait until the server ends the connection, throwing away what it sends."""
        start = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while self._file.read1(1 << 20):
                pass
        return time.monotonic() - start


def request(target: str = "/echo", body: bytes = b"", fields: str = "") -> bytes:
    """The bytes of a POST with a body, or of a GET."""
    method = "POST" if body else "GET"
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {target} HTTP/1.1\r\nHost: test\r\n{length}{fields}\r\n".encode() + body


@dataclass
class Server:
    """A running Gunicorn."""

    process: Forked
    log: Path
    events_file: Path
    port: int = 0

    def ask(self, target: str = "/echo", **kwargs: Any) -> Reply:
        """One request on a connection of its own."""
        with Client(self.port) as client:
            return client.ask(target, **kwargs)

    def state(self) -> Any:
        """The fake application's counters."""
        return self.ask("/state").json

    def events(self) -> list[str]:
        """What the application noted about the end of its life, in order."""
        return self.events_file.read_text().split() if self.events_file.exists() else []

    def frontends(self) -> list[psutil.Process]:
        """The children of the arbiter."""
        # PERF: `psutil.Process.children` reads the state of every process of the machine.
        pid, found = self.process.pid, []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(child)))
        return found

    def signal(self, sig: signal.Signals) -> None:
        """Send a signal to the arbiter."""
        self.process.send_signal(sig)

    def seconds_to_exit(self, timeout_s: float = PATIENCE_S) -> float:
        """Wait for the arbiter's end."""
        start = time.monotonic()
        self.process.wait(timeout_s)
        return time.monotonic() - start


@contextlib.contextmanager
def serving(
    tmp_path: Path, limits: dict[str, float] | None = None, max_draining: int = 8, **settings: Any
) -> Iterator[Server]:
    """Run Gunicorn on a free port of the loopback; at the end nothing of it is left.

    While there is a file `hold` in `tmp_path`, new frontends go no further than their fork.
    """
    log, events, config = tmp_path / "error.log", tmp_path / "events", tmp_path / "gunicorn.conf.py"
    lines = [f"{name} = {value!r}" for name, value in settings.items()]
    config.write_text(
        _CONFIG.format(
            limits=limits or {}, log=str(log), max_draining=max_draining, hold=str(tmp_path / "hold")
        )
        + "\n".join(lines)
        + "\n"
    )
    count_server()
    environment = {**os.environ, "ASGI_APP_EVENTS": str(events)}
    with (tmp_path / "out").open("wb") as output:
        process = lives.python(
            "frontends",
            ["-m", "gunicorn", "-c", str(config)],
            environment,
            output.fileno(),
            "tests.harness.lives:fork_from_here_on",
        )
    server = Server(process, log, events)
    try:
        server.port = int(wait_until(lambda: _find_port(server)))
        wait_until(lambda: _answers(server))
        yield server
    finally:
        _end(server)


def _answers(server: Server) -> bool:
    # NOTE: a client that stands still may miss the deadline of its head.
    with contextlib.suppress(ConnectionError):
        return server.ask().status == 200
    return False


def _find_port(server: Server) -> str | None:
    assert server.process.poll() is None, server.log.read_text() if server.log.exists() else "no log"
    found = re.search(
        r"Listening at: http://127.0.0.1:(\d+)", server.log.read_text() if server.log.exists() else ""
    )
    return found[1] if found else None


def _end(server: Server) -> None:
    family = (
        [*server.frontends(), psutil.Process(server.process.pid)] if server.process.poll() is None else []
    )
    if server.process.poll() is None:
        server.signal(signal.SIGQUIT)
        try:
            server.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert not alive, f"still running after a fast stop: {alive}"
