"""The mode of the systemd units: no embedded supervisor, workers started one by one, both sides speaking sd_notify."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ipc.processes.starting import Listener
from tests.harness.server import PATIENCE_S, ROOT, Server, make_server, wait_until

EXIT_UNFIT = 5
COMMAND = [sys.executable, "-m", "workers", "--slot", "0"]


class Unit:
    """What systemd would hear from one unit."""

    def __init__(self, path: Path) -> None:
        self._listener = Listener(path)
        self.environment = {"NOTIFY_SOCKET": str(path)}
        self.pings = 0
        self.fields: dict[str, str] = {}

    def listen(self) -> dict[str, str]:
        """All fields that were ever heard, later ones winning."""
        heard = self._listener.receive()
        self.pings += "WATCHDOG" in heard
        self.fields |= heard
        return self.fields

    def is_ready(self) -> bool:
        """Whether READY=1 was heard."""
        return self.listen().get("READY") == "1"

    def wait_pings(self, count: int = 3) -> None:
        """Wait for that many more watchdog pings."""
        seen = self.pings
        wait_until(lambda: self.listen() and self.pings >= seen + count, what="watchdog pings")

    def close(self) -> None:
        """End the socket."""
        self._listener.close()


@dataclass
class Site:
    """A frontend service and what its worker unit needs."""

    server: Server
    frontend: Unit
    worker: Unit
    log: Path

    @contextlib.contextmanager
    def running_worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """Worker 0, started by hand."""
        with self.log.open("ab") as log:
            environment = self.server.environment | self.worker.environment
            process = subprocess.Popen(COMMAND, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(60)


@contextlib.contextmanager
def site(tmp_path: Path, model: str = "fake/echo") -> Iterator[Site]:
    """Frontends without a supervisor; at the end nothing is left."""
    server = make_server(tmp_path, (model,))
    frontend, worker = Unit(tmp_path / "frontend.sock"), Unit(tmp_path / "worker.sock")
    server.environment |= {"PENSTOCK_SUPERVISE": "0"} | frontend.environment
    server.start()
    try:
        yield Site(server, frontend, worker, tmp_path / "worker.log")
        assert server.stop() == 0, server.log
        server.assert_nothing_left()
    finally:
        server.kill_everything()
        frontend.close()
        worker.close()


def answers(server: Server, path: str) -> int:
    """Status of a path; 0 when nobody listens yet."""
    with contextlib.suppress(OSError):
        return server.get(path, timeout_s=5).status
    return 0


def blocks(server: Server) -> int:
    """How often the start-up block was printed."""
    return server.log.count(" is ready\n")


def assert_silent_while_stopped(found: Site, pid: int) -> None:
    """A stopped worker sends no pings and costs the server its readiness, until it goes on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: answers(found.server, "/readyz") == 503, what="readiness lost")
        found.worker.listen()
        pings = found.worker.pings
        found.frontend.wait_pings(2)
        found.worker.listen()
        assert found.worker.pings == pings
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: answers(found.server, "/readyz") == 200, what="readiness again")


@pytest.mark.long
def test_a_worker_without_its_card_ends_with_the_code_that_systemd_tries_again(tmp_path: Path) -> None:
    server = make_server(tmp_path, settings={"worker.device": "cuda"})
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env=server.environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_UNFIT, done.stderr
    assert "torch finds no CUDA device" in done.stderr
    server.assert_nothing_left()


def test_a_worker_started_by_hand_is_served_and_both_units_report_to_systemd(tmp_path: Path) -> None:
    with site(tmp_path) as found:
        server = found.server
        wait_until(lambda: answers(server, "/livez") == 200, what="a frontend")
        found.frontend.wait_pings()
        assert not found.frontend.is_ready(), "READY without a worker"
        assert answers(server, "/readyz") == 503
        assert "no worker" in found.frontend.listen()["STATUS"]
        with found.running_worker() as worker:
            wait_until(found.worker.is_ready, what="READY=1 from the worker")
            wait_until(found.frontend.is_ready, what="READY=1 from the frontend")
            assert found.worker.fields["STATUS"] == "1/1 models ready"
            assert answers(server, "/readyz") == 200
            assert server.encode("fake/echo", ["by hand"]).status == 200
            found.worker.wait_pings()
            found.frontend.wait_pings()
            assert "1/1 models ready" in found.frontend.fields["STATUS"]
            assert server.supervisor_pid() is None
            assert_silent_while_stopped(found, worker.pid)
            found.worker.listen()
            worker.send_signal(signal.SIGTERM)
            wait_until(
                lambda: found.worker.listen() and worker.poll() is not None, what="the end of the worker"
            )
            assert worker.returncode == 0, found.log.read_text()
            assert found.worker.listen().get("STOPPING") == "1"
        wait_until(lambda: answers(server, "/readyz") == 503, what="readiness lost with the worker")
        # A worker takes leave, which costs the readiness, before the worker ends.
        wait_until(lambda: "worker 0 has ended in order" in server.log, what="the end in the log")
        assert "worker 0 died" not in server.log
        with found.running_worker() as successor:
            wait_until(lambda: answers(server, "/readyz") == 200, what="the successor's readiness")
            assert server.encode("fake/echo", ["again"]).status == 200
            successor.send_signal(signal.SIGTERM)
            assert successor.wait(60) == 0


def assert_slot_is_held(server: Server) -> None:
    """A second worker on the same slot is refused, and what belongs to the first is left alone."""
    second = subprocess.run(
        COMMAND, cwd=ROOT, env=server.environment, capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert second.returncode == 3
    assert b"worker-0.lock is held by another live process" in second.stderr
    assert server.arenas(), "the arena of the live worker was removed"


@pytest.mark.long
def test_a_worker_holds_its_slot_and_outlives_a_restart_of_the_frontends(tmp_path: Path) -> None:
    with site(tmp_path) as found, found.running_worker() as worker:
        server = found.server
        wait_until(lambda: blocks(server) == 1, what="the first start-up block")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert worker.poll() is None
        server.start()
        wait_until(lambda: blocks(server) == 2, what="the second start-up block")
        assert_slot_is_held(server)
        assert server.encode("fake/echo", ["kept"]).status == 200
        assert server.worker_pid() == worker.pid
        worker.send_signal(signal.SIGTERM)
        # It says STOPPING before it ends, and says so again until somebody listens.
        wait_until(lambda: found.worker.listen() and worker.poll() is not None, what="the end of the worker")
        assert worker.returncode == 0


@pytest.mark.long
def test_ready_is_told_again_when_nobody_listened_at_first(tmp_path: Path) -> None:
    # While the model loads, pings fill the socket, which the kernel bounds to net.unix.max_dgram_qlen messages.
    with site(tmp_path, "fake/late") as found, found.running_worker() as worker:
        wait_until(lambda: answers(found.server, "/readyz") == 200, what="readiness")
        found.frontend.wait_pings()
        wait_until(found.worker.is_ready, what="READY=1 from the worker")
        wait_until(found.frontend.is_ready, what="READY=1 from the frontend")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
