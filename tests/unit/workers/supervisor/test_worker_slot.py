"""How the supervisor reads the end of a worker, whose last words it may not have read yet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.processes.liveness import processor_ticks, waits_for_machine
from ipc.processes.paths import prepare_run_dir
from ipc.processes.starting import Notifier
from ipc.settings import load
from tests.fakes.child import FakeChild
from tests.fakes.clock import Clock
from tests.harness.server import wait_until
from workers.spare import Assignment
from workers.supervisor import slots
from workers.supervisor.slots import REFUSALS, Child, Kind, Slot, Spares

WORKER = Kind("worker", "workers", True, 300.0)


@pytest.fixture
def slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slot:
    """A slot whose process ends at once, in order."""
    settings = load(None, {"run.dir": str(tmp_path), "worker.device": "cpu"}, {})
    prepare_run_dir(settings.paths)
    made = Slot(WORKER, 0, settings, settings.paths.notify_socket(0), Spares(settings))

    def start() -> Child:
        process = subprocess.Popen([sys.executable, "-c", ""])
        read, write = os.pipe()
        os.close(read)
        return Child(process, os.pidfd_open(process.pid), write)

    monkeypatch.setattr(made, "_start", start)
    return made


@pytest.mark.parametrize("said", ["STOPPING=1", "READY=1\nSTOPPING=1", "READY=1", ""])
def test_a_worker_that_said_that_it_stops_ended_in_order(slot: Slot, said: str) -> None:
    assert slot.start_if_due()
    worker = Notifier(str(slot.listener.path))
    for line in said.split():
        name, value = line.split("=")
        assert worker.send(**{name.lower(): int(value)})
    assert slot.reap(others_healthy=True) == ("drained" if "STOPPING" in said else "exit-0")
    assert slot.proven == ("READY" in said)
    slot.close()


def test_a_worker_is_told_how_the_life_before_ended(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, told in ((-signal.SIGKILL, "signal-9"), (-signal.SIGSEGV, "signal-11"), (70, "exit-70")):
        monkeypatch.setattr(slot, "_start", lambda code=code: FakeChild(-1, code))
        monkeypatch.setattr(slot, "_start_at", 0.0)
        assert slot.start_if_due()
        slot.reap(others_healthy=True)
        assert slot._environment()["WORKER_ENDED_BY"] == told


@pytest.mark.parametrize("code", REFUSALS)
def test_a_worker_that_refuses_to_start_is_told_from_one_that_fails(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(slot, "_start", lambda: FakeChild(-1, code))
    assert slot.start_if_due()
    assert slot.reap(others_healthy=False) == f"exit-{code}"
    assert slot.misconfigured
    assert not slot.quarantined
    slot.close()


def test_a_ready_worker_without_heartbeats_is_killed_long_before_a_step_counts_as_a_hang(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slot._settings.worker.heartbeat_timeout_s == 2.0 < slot._settings.worker.hang_timeout_s
    monkeypatch.setattr(slots, "processor_ticks", lambda pid: 7)
    clock, worker, sent = _ready(slot, monkeypatch)
    for _ in range(30):
        clock.now += 1.9
        assert worker.send(watchdog=1)
        slot.heard()
        slot.kill_if_silent()
    assert not sent, "a step of a minute, and heartbeats meanwhile"
    look(slot, clock, 0.6, times=3)
    assert not sent
    look(slot, clock, 0.6)
    assert sent == [signal.SIGKILL]
    slot.reap(others_healthy=True)
    slot.close()


@pytest.mark.parametrize(("pause_s", "times"), [(3600.0, 1), (1.5, 2)])
def test_time_in_which_the_supervisor_stood_still_is_no_silence_of_the_worker(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, pause_s: float, times: int
) -> None:
    monkeypatch.setattr(slots, "processor_ticks", lambda pid: 7)
    clock, _, sent = _ready(slot, monkeypatch)
    look(slot, clock, pause_s, times=times)
    assert not sent
    look(slot, clock, 0.6, times=2)
    assert sent == [signal.SIGKILL], "the worker is silent while others run"
    slot.reap(others_healthy=True)
    slot.close()


def test_a_silent_worker_that_waits_for_a_processor_or_a_page_has_the_time_of_a_hang(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "processor_ticks", lambda pid: 7)
    clock, _, sent = _ready(slot, monkeypatch)
    monkeypatch.setattr(slots, "waits_for_machine", lambda pid: True)
    look(slot, clock, 0.6, times=99)
    assert not sent, "59 s"
    look(slot, clock, 0.6, times=2)
    assert sent == [signal.SIGKILL]
    slot.reap(others_healthy=True)
    slot.close()


def look(slot: Slot, clock: Clock, pause_s: float, *, times: int = 1) -> None:
    """Look at the process so often, after a pause each time."""
    for _ in range(times):
        clock.now += pause_s
        slot.kill_if_silent()


def _ready(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Notifier, list[int]]:
    """The slot's process is ready: the clock, what the process speaks through, and the signals to the process."""
    assert slot.start_if_due()
    monkeypatch.setattr(slots, "waits_for_machine", lambda pid: False)
    clock = Clock.of(slots, monkeypatch)
    sent: list[int] = []
    monkeypatch.setattr(slot, "signal", sent.append)
    worker = Notifier(str(slot.listener.path))
    assert worker.send(ready=1)
    slot.heard()
    look(slot, clock, 0.0)
    return clock, worker, sent


@pytest.mark.parametrize("works_on", [True, False])
def test_a_silent_worker_that_uses_the_processor_has_the_time_of_a_hang(
    slot: Slot, monkeypatch: pytest.MonkeyPatch, works_on: bool
) -> None:
    ticks = [0]
    monkeypatch.setattr(slots, "processor_ticks", lambda pid: ticks[0])
    clock, _, sent = _ready(slot, monkeypatch)
    for _ in range(117):
        clock.now += 0.5
        ticks[0] += 5
        slot.kill_if_silent()
    assert not sent, "one call of C code holds the lock of the interpreter for 58 s"
    # Then the process stands still, or works for longer than any step may take.
    look(slot, clock, 0.55)
    ticks[0] += works_on
    look(slot, clock, 0.55)
    assert bool(sent) is not works_on
    if works_on:
        ticks[0] += 1
        clock.now += 1.0
        slot.kill_if_silent()
    assert sent == [signal.SIGKILL]
    slot.reap(others_healthy=True)
    slot.close()


def test_the_processor_time_of_a_process_grows() -> None:
    before = processor_ticks(os.getpid())
    while processor_ticks(os.getpid()) == before:
        pass
    assert processor_ticks(os.getpid()) > before
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert processor_ticks(gone.pid) == 0


def test_a_process_that_sleeps_or_is_stopped_waits_for_nothing_of_the_machine() -> None:
    assert waits_for_machine(os.getpid()), "this thread runs"
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(lambda: waits_for_machine(child.pid), what="the loop")
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: not waits_for_machine(child.pid), what="the stop")
    finally:
        child.kill()
        child.wait()
    assert not waits_for_machine(child.pid)
    child = subprocess.Popen(["sleep", "60"])
    try:
        wait_until(lambda: not waits_for_machine(child.pid), what="the sleep")
    finally:
        child.kill()
        child.wait()


def test_a_slot_goes_to_a_spare_before_a_new_process_is_started(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = FakeChild(7)

    def take(assignment: Assignment) -> FakeChild:
        spare.assign(assignment)
        return spare

    monkeypatch.setattr(slot._spares, "take", take)
    assert slot.start_if_due()
    assert (slot.state, slot.pidfd) == ("starting", 7)
    assert spare.assigned == [
        Assignment(0, {"NOTIFY_SOCKET": str(slot.listener.path), "WORKER_ENDED_BY": ""})
    ]
    assert slot.reap(others_healthy=True) == "signal-9"
    assert slot.pidfd == -1
    slot.close()
