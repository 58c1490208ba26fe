"""Start Penstock as its users do: `gunicorn -c gunicorn.conf.py`, with settings from the environment.

Each server gets a port, a run directory and an instance name of its own, so that several can run on one machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.connection import Connection
from benchmarks.load import Address
from benchmarks.processes import Server, children, command_line, free_port

ROOT = Path(__file__).resolve().parents[1]
FAKE_CATALOG = ROOT / "tests" / "fakes" / "catalog"
Settings = Mapping[str, str | int | float]
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def answers(address: Address, path: str) -> bool:
    """Whether a GET of `path` is answered 200 now."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    with contextlib.suppress(OSError, ValueError), Connection(address, timeout_s=2.0) as connection:
        return connection.fetch(request)[0] == 200
    return False


def environment_of(settings: Settings) -> dict[str, str]:
    """`{"server.frontends": 2}` as `PENSTOCK_SERVER__FRONTENDS=2`."""
    return {f"PENSTOCK_{name.replace('.', '__').upper()}": str(value) for name, value in settings.items()}


@contextlib.contextmanager
def penstock(
    models: str, settings: Settings, *, fakes: bool = False, ready: str = "/readyz"
) -> Iterator[Server]:
    """A Penstock server that serves `models` (comma separated), by default on the CPU; stopped on exit.

    Entering waits until a GET of `ready` is answered 200. `fakes` takes the catalog of fake models of the tests.
    `settings` are named `section.field`.
    """
    port = free_port()
    run_dir = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    values: dict[str, str | int | float] = {
        "server.bind": f"127.0.0.1:{port}",
        "run.dir": str(run_dir),
        "run.instance": f"bench-{port}",
        "worker.device": "cpu",
        "catalog.models": models,
        "log.level": "warning",
        "grpc.enabled": "false",
    }
    if fakes:
        values["catalog.dirs"] = str(FAKE_CATALOG)
    values.update(settings)
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = Server(
        "penstock",
        [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py"],
        ("127.0.0.1", port),
        lambda: answers(("127.0.0.1", port), ready),
        environment_of(values) | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
    )
    try:
        with server:
            yield server
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def frontend_pids(server: Server) -> list[int]:
    """The HTTP processes of a Penstock server: the children of the arbiter that serve requests.

    Gunicorn writes process titles over the environment that `Server.pids` reads, so only the titles are looked at.
    """
    return [pid for pid in children(server.pid) if "frontend" in command_line(pid)]


def worker_pids(server: Server) -> list[int]:
    """The model processes of a Penstock server."""
    return server.pids_running("penstock: worker ", "-m workers --slot")
