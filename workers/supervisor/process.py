"""Starts one worker per slot and keeps them alive, in embedded mode.

1. Take the supervisor lock, or stand by until its holder dies (a binary upgrade starts a second one).
2. Start every slot. Poll the processes' pidfds, their notify sockets, and the life pipe of the server.
3. A dead worker is started again after its back-off, by a spare where there is one; a silent one is killed first.
4. SIGTERM, or EOF on the life pipe (arbiter and all frontends are gone): drain the workers, sweep, exit 0.

The tool host has a slot as well, of another `Kind`, if a tool is enabled. Its failures quarantine no worker and count
as none. `misconfigured` at its first start stops the server, as that of a worker does.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import time

from ipc import logs, settings, sweep
from ipc.errors import ConfigError
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotLock, SlotTaken
from ipc.processes.paths import prepare_run_dir
from workers.supervisor.slots import EXIT_CONFIG, Spares, slots_of

log = logging.getLogger(__name__)

POLL_S = 0.2


class Supervisor:
    """All slots of one server."""

    def __init__(self, config: settings.Settings, life_fd: int) -> None:
        self._config, self._life_fd = config, life_fd
        self._spares = Spares(config)
        self._slots = [*slots_of(config, self._spares)]
        self._metrics = metrics.SupervisorMetrics()
        self._poll = select.poll()
        self._stopping = False
        self.exit_code = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for fd in (life_fd, self._wake_read):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)
        for slot in self._slots:
            self._poll.register(slot.listener.fileno(), select.POLLIN)
            self._metrics.quarantined.labels(slot.label).set(0)
            for cause in ("signal-9", "hang"):
                self._metrics.restarts.labels(slot.label, cause)

    def stop(self, *_: object) -> None:
        """End `run`. Safe as a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Keep the workers alive until `stop`, then drain them."""
        while not self._stopping:
            for slot in self._slots:
                if slot.start_if_due():
                    self._poll.register(slot.pidfd, select.POLLIN)
            if not any(slot.state == "starting" for slot in self._slots):
                spare = self._spares.start_if_due()
                if spare is not None:
                    self._poll.register(spare, select.POLLIN)
            self._turn()
            for slot in self._slots:
                slot.kill_if_silent()
        self._drain()

    def _turn(self) -> None:
        for fd, _ in self._poll.poll(POLL_S * 1000):
            if fd == self._life_fd:
                log.info("the server is gone")
                self._poll.unregister(fd)
                self._stopping = True
            elif fd == self._wake_read:
                os.read(fd, 64)
            elif self._spares.reap(fd):
                self._poll.unregister(fd)
            else:
                self._slot_event(fd)

    def _slot_event(self, fd: int) -> None:
        for slot in self._slots:
            if fd == slot.listener.fileno():
                slot.heard()
            elif fd == slot.pidfd:
                self._poll.unregister(fd)
                peers = [other for other in self._slots if other.kind == slot.kind]
                cause = slot.reap(any(other.state == "ready" for other in peers if other is not slot))
                self._metrics.restarts.labels(slot.label, cause).inc()
                self._metrics.quarantined.labels(slot.label).set(slot.quarantined)
                if slot.misconfigured and not any(other.proven for other in peers):
                    log.critical(
                        "%s %d cannot start with this configuration; the server stops",
                        slot.kind.name,
                        slot.slot,
                    )
                    self._stopping, self.exit_code = True, EXIT_CONFIG

    def _drain(self) -> None:
        """Send SIGTERM to all workers, and SIGKILL to workers that do not end in time."""
        limit = time.monotonic() + self._config.worker.drain_timeout_s + 5.0
        for pidfd in self._spares.close():
            self._poll.unregister(pidfd)
        for slot in self._slots:
            slot.state = "stopping" if slot.pidfd >= 0 else "ended"
            slot.signal(signal.SIGTERM)
        while any(slot.pidfd >= 0 for slot in self._slots):
            if time.monotonic() > limit:
                for slot in self._slots:
                    slot.signal(signal.SIGKILL)
            self._turn()
        for slot in self._slots:
            slot.close()


def _stand_by(config: settings.Settings, life_fd: int) -> SlotLock | None:
    """Wait for the supervisor lock. Returns None if our own server ends first."""
    logged = False
    while True:
        try:
            return SlotLock(config.paths.lock("supervisor"))
        except SlotTaken:
            if not logged:
                log.info("another supervisor is at work; standing by")
                logged = True
        if life_fd < 0:
            time.sleep(POLL_S)
        elif select.select([life_fd], [], [], POLL_S)[0]:
            return None


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.supervisor.process", description="Keeps the worker processes alive."
    )
    parser.add_argument(
        "--life-fd", type=int, default=-1, help="descriptor that ends when the server is gone"
    )
    options = parser.parse_args(argv)
    try:
        config = settings.load()
        logs.configure(config.log, "supervisor")
        processes.title("supervisor")
        prepare_run_dir(config.paths)
        lock = _stand_by(config, options.life_fd)
        if lock is None:
            return 0
        sweep.sweep(config.paths)
        metrics.configure(config.paths, "supervisor")
        supervisor = Supervisor(config, options.life_fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, supervisor.stop)
        supervisor.run()
        lock.release()
        sweep.sweep(config.paths)
        return supervisor.exit_code
    except ConfigError as error:
        if logging.getLogger().handlers:
            log.critical("%s", error.message)
        else:
            sys.stderr.write(f"supervisor: {error.message}\n")
        return EXIT_CONFIG
    finally:
        logs.flush()


if __name__ == "__main__":
    sys.exit(main())
