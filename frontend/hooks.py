"""What `gunicorn.conf.py` hooks into Gunicorn: settings in, supervisor up, sweep before and after.

Embedded mode: the arbiter makes a life pipe, keeps its write end (frontends inherit it by fork), and starts the
supervisor with the read end, in a process session of its own. The supervisor sees EOF exactly when arbiter and
frontends are all gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from frontend import announce, configuration
from frontend.grpc import address
from frontend.grpc.succession import SUCCESSION
from frontend.server.limits import ServerLimits
from frontend.server.worker import PenstockWorker
from ipc import sweep
from ipc.errors import ConfigError
from ipc.liveness import life_pipe
from ipc.paths import prepare_run_dir
from ipc.settings import Settings

EXIT_CONFIG = 3


def read_settings() -> Settings:
    """Checked settings; at the start a mistake in them ends the process with code 3 and one line."""
    try:
        return configuration.accept().settings
    except ConfigError as error:
        sys.stderr.write(f"penstock: {error.message}\n")
        raise SystemExit(EXIT_CONFIG) from error


def hide_notify_socket() -> None:
    """Gunicorn reports READY before the application is up; Penstock reports it itself."""
    address = os.environ.pop("NOTIFY_SOCKET", None)
    if address:
        os.environ["PENSTOCK_NOTIFY_SOCKET"] = address


def worker_class(config: Settings) -> Any:
    """Gunicorn worker class by `server.worker_class`, with its limits set."""
    server = config.server
    PenstockWorker.limits = ServerLimits(
        keepalive_s=server.keepalive_s,
        graceful_timeout_s=server.graceful_timeout_s,
        drain_s=server.drain_s,
        header_deadline_s=server.header_deadline_s,
        body_floor_bytes_per_s=server.body_floor_bytes_per_s,
        body_floor_after_s=server.body_floor_after_s,
        max_connections=server.max_connections,
        max_grpc_connections=config.grpc.max_connections if config.grpc.enabled else 0,
        write_stall_s=server.write_stall_s,
        max_header_bytes=server.max_header_bytes,
        version_header=server.version_header,
    )
    return PenstockWorker if server.worker_class == "penstock" else "asgi"


def on_starting(server: Any) -> None:
    """Before listeners and forks: gRPC's port, run directory, sweep, supervisor."""
    config = configuration.current().settings
    try:
        if config.grpc.enabled:
            server.penstock_grpc_port = address.keep(config.grpc)
        prepare_run_dir(config.paths)
    except ConfigError as error:
        sys.stderr.write(f"penstock: {error.message}\n")
        raise SystemExit(EXIT_CONFIG) from error
    for name in sweep.sweep(config.paths):
        server.log.info("removed %s, left by an earlier run", name)
    announce.forget(config.paths)
    sweep.forget(config.paths)
    if os.environ.get("PENSTOCK_SUPERVISE", "1") == "0":
        return
    read, write = life_pipe()
    os.set_inheritable(read, True)
    server.penstock_life_pipe = write
    command = [sys.executable, "-m", "workers.supervisor", "--life-fd", str(read)]
    process = subprocess.Popen(command, pass_fds=(read,), start_new_session=True, stdin=subprocess.DEVNULL)
    # NOTE: the arbiter reaps every child it has; Popen must not try to wait for it as well.
    process.returncode = 0
    os.close(read)
    server.log.info("supervisor started (pid %d)", process.pid)


def on_reload(server: Any) -> None:
    """Before the frontends are replaced."""
    SUCCESSION.reloading()


def on_exit(server: Any) -> None:
    """The arbiter ends: in embedded mode the supervisor drains the workers and sweeps after them."""
    write = getattr(server, "penstock_life_pipe", -1)
    if write >= 0:
        os.close(write)
