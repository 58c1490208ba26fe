"""What `gunicorn.conf.py` hooks into Gunicorn: settings, lock of the run directory, supervisor, sweeps.

1. The arbiter takes the lock of the run directory before it sweeps, writes or starts anything. A second server with the
   same directory changes nothing and names the first. The kernel drops the lock with the arbiter, `kill -9` included.
2. Then every address must be free. Frontends of a dead arbiter close their listeners within seconds: the arbiter waits.
3. Embedded mode: the arbiter makes a life pipe, keeps its write end (frontends inherit it by fork), and starts the
   supervisor with the read end, in a process session of its own. The supervisor sees EOF exactly when arbiter and
   frontends are all gone.
4. A signal that ends a frontend waits while the frontend has the arbiter's handlers (`heed_signals`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gunicorn.arbiter import Arbiter

from frontend.arbiter import configuration
from frontend.http import listeners
from frontend.server.drain import ENDING, SUCCESSION, end_by_default
from frontend.server.serving import PenstockWorker
from frontend.server.state import ServerLimits
from ipc import logs, sweep
from ipc.addresses import ensure_free, port_of, reserve
from ipc.errors import ConfigError
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotLock, SlotTaken, is_held, life_pipe
from ipc.processes.paths import SERVER, prepare_run_dir
from ipc.settings import Settings
from ipc.version import VERSION

log = logging.getLogger(__name__)

SET_APART = math.inf
"""The age of a frontend that was told to end. A reload of Gunicorn waits for frontends of a lower age than its own."""
EXIT_CONFIG = 3


class PatientArbiter(Arbiter):  # type: ignore[misc]
    """Gunicorn's arbiter with frontends that may take long to end: those that a reload replaces finish their streams.

    1. Gunicorn counts frontends that drain among those that serve, and so replaces none that dies meanwhile, and a
       reload waits for their end. Here a frontend that was told to end is set apart: the others are kept at their
       number.
    2. Frontends of `server.max_draining` reloads may drain. Beyond, the oldest are told once more, and end at once.
    3. SIGHUPs that come while the arbiter is busy are one reload.
    4. A frontend is forked with the arbiter's handlers, which queue signals that nobody takes from there. Signals that
       end a frontend are blocked until `heed_signals`; else a stop waits `graceful_timeout_s` for a frontend that was
       just forked, and a reload leaves such a frontend for ever.
    """

    max_draining: Callable[[], int]
    penstock_draining: list[list[int]]
    """Processes that were told to end, by the reload that replaced them, the oldest first."""

    def wait_for_signals(self, timeout: float = 1.0) -> list[int]:
        """Signals in their order."""
        signals: list[int] = super().wait_for_signals(timeout)
        return [sig for at, sig in enumerate(signals) if sig != signal.SIGHUP or sig not in signals[:at]]

    def manage_workers(self) -> None:
        """Keep the number of frontends that serve: start missing ones, and tell the oldest of too many to end."""
        serving = sorted((each for each in self.WORKERS.values() if each.age != SET_APART), key=_age)
        for _ in range(self.num_workers - len(serving)):
            self.spawn_worker()
        ending = serving[: max(0, len(serving) - self.num_workers)]
        for each in ending:
            each.age = SET_APART
            self.kill_worker(each.pid, signal.SIGTERM)
        draining = [*self.penstock_draining, [each.pid for each in ending]]
        alive = [[pid for pid in pids if pid in self.WORKERS] for pids in draining]
        self.penstock_draining = [pids for pids in alive if pids]
        self._end_oldest()

    def spawn_worker(self) -> int:
        """Fork a frontend; the pid. A signal that comes to the arbiter meanwhile is handled at the end."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            return int(super().spawn_worker())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end_oldest(self) -> None:
        """Tell the frontends of reloads beyond the bound to end at once."""
        while len(self.penstock_draining) > self.max_draining():
            for pid in self.penstock_draining.pop(0):
                self.kill_worker(pid, signal.SIGTERM)

    def stop(self, graceful: bool = True) -> None:
        """Stop the server: frontends learn that no other follows them."""
        SUCCESSION.stopping()
        super().stop(graceful)


def _age(worker: Any) -> float:
    return float(worker.age)


def take_over(server: Any, max_draining: Callable[[], int]) -> None:
    """Make the arbiter that Gunicorn has built a `PatientArbiter`. Gunicorn has no setting for its class.

    `max_draining` gives the present bound on reloads whose old frontends drain.
    """
    server.__class__ = PatientArbiter
    server.max_draining, server.penstock_draining = max_draining, []


def read_settings() -> Settings:
    """Checked settings. At the start a mistake ends the process with code 3 and one line."""
    try:
        settings = configuration.accept().settings
    except ConfigError as error:
        # The form of log lines is not known without settings.
        sys.stderr.write(f"penstock: {error.message}\n")
        raise SystemExit(EXIT_CONFIG) from error
    logs.configure(settings.log, "arbiter", forks=True)
    return settings


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
        stream_drain_s=server.stream_drain_s,
        drain_s=server.drain_s,
        header_deadline_s=server.header_deadline_s,
        body_floor_bytes_per_s=server.body_floor_bytes_per_s,
        body_floor_after_s=server.body_floor_after_s,
        health_port=port_of(server.health_bind, "server.health_bind") if server.health_bind else 0,
        max_connections=server.max_connections,
        max_grpc_connections=config.grpc.max_connections if config.grpc.enabled else 0,
        write_stall_s=server.write_stall_s,
        max_header_bytes=server.max_header_bytes,
        version_header=server.version_header,
    )
    return PenstockWorker if server.worker_class == "penstock" else "asgi"


def on_starting(server: Any) -> None:
    """Before listeners and forks: lock the run directory, see that addresses are free, sweep, start the supervisor."""
    config = configuration.current().settings
    take_over(server, lambda: configuration.current().settings.server.max_draining)
    try:
        server.penstock_lock = take_run_directory(config)
        if config.grpc.enabled:
            server.penstock_grpc_port = reserve(config.grpc.bind, "grpc.bind")
    except ConfigError as error:
        log.critical("%s", error.message)
        raise SystemExit(EXIT_CONFIG) from error
    log.info("Penstock %s starts in %s", VERSION, config.paths.root)
    if config.agent.acts and not config.server.keys_file:
        log.warning("tools are on and server.keys_file is empty: every program of this machine may run them")
    for name in sweep.sweep(config.paths):
        log.info("removed %s, left by an earlier run", name)
    try:
        sweep.forget(config.paths, (*config.catalog.dirs, *config.repository.dirs))
    except OSError as error:
        log.critical("run.dir %s cannot be used: %s", config.paths.root, error.strerror)
        raise SystemExit(EXIT_CONFIG) from error
    if config.is_gateway or os.environ.get("PENSTOCK_SUPERVISE", "1") == "0":
        return
    read, write = life_pipe()
    os.set_inheritable(read, True)
    server.penstock_life_pipe = write
    process = subprocess.Popen(
        processes.command("workers.supervisor.process", "--life-fd", str(read)),
        env=processes.environment(),
        pass_fds=(read,),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    # NOTE: the arbiter reaps every child it has; Popen must not try to wait for it as well.
    process.returncode = 0
    os.close(read)
    log.info("supervisor started (pid %d)", process.pid)


def when_ready(server: Any) -> None:
    """The arbiter listens; frontends and workers have not started yet."""
    log.info("listening on %s", ", ".join(listeners.binds(configuration.current().settings)))


def pre_fork(server: Any, worker: Any) -> None:
    """Before a frontend starts. Gunicorn has changed the title of this process, at its start and at each reload."""
    processes.title("arbiter")


def heed_signals() -> None:
    """In a new frontend: signals that end a process do so from here on, and those that have come already do so now."""
    end_by_default()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def post_fork(server: Any, worker: Any) -> None:
    """In a new frontend: drop the inherited lock of the run directory, since the arbiter's death must free the lock."""
    heed_signals()
    server.penstock_lock.release()
    logs.configure(configuration.current().settings.log, "frontend", forks=True)


def on_reload(server: Any) -> None:
    """Before the frontends are replaced."""
    log.info("reloading: new frontends start, the old ones drain")
    SUCCESSION.reloading()


def on_exit(server: Any) -> None:
    """The arbiter ends: in embedded mode the supervisor drains the workers and sweeps after them."""
    log.info("the frontends have ended; the server stops")
    write = getattr(server, "penstock_life_pipe", -1)
    if write >= 0:
        os.close(write)


_LOOK_EVERY_S = 0.1


def take_run_directory(config: Settings) -> SlotLock:
    """Lock the run directory of this server. Raises `ConfigError` if a server runs there or an address is taken."""
    paths = config.paths
    prepare_run_dir(paths)
    try:
        lock = SlotLock(paths.lock(SERVER))
    except SlotTaken as error:
        raise ConfigError(
            f"a server runs with these settings: {error.message} in {paths.root}; nothing was changed. "
            "Stop that one first, or choose another server.bind, and another run.dir if that is set"
        ) from None
    until = time.monotonic() + config.server.graceful_timeout_s
    had_frontends = True
    while True:
        # NOTE: first the frontends, then the addresses: a frontend that ends between the two looks has freed both.
        has_frontends = _has_old_frontends(config)
        try:
            return _addresses_free(config, lock)
        except ConfigError:
            if not had_frontends or time.monotonic() > until:
                lock.release()
                raise
            time.sleep(_LOOK_EVERY_S)
        had_frontends = has_frontends


def require_free_addresses(config: Settings) -> None:
    """Raise `ConfigError` for an address of another program, for checks of the command line that take nothing.

    A running server with these settings may have the address.
    """
    if not is_held(config.paths.lock(SERVER)):
        for bind, setting in listeners.binds(config).items():
            ensure_free(bind, setting)


def _addresses_free(config: Settings, lock: SlotLock) -> SlotLock:
    # NOTE: systemd's socket units listen already; Gunicorn takes those sockets in place of server.bind.
    activated = os.environ.get("LISTEN_PID") == str(os.getpid())
    for bind, setting in listeners.binds(config).items():
        if not (activated and setting.startswith("server.")):
            ensure_free(bind, setting)
    return lock


def _has_old_frontends(config: Settings) -> bool:
    """Whether frontends of a dead arbiter live: this process holds the arbiter's lock, so their arbiter is dead."""
    return any(is_held(path) for path in config.paths.root.glob("frontend-*.lock"))
