"""What `penstock status` finds in a run directory without a server's help, and how the command prints a view."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ipc.processes.liveness import SlotLock
from ipc.processes.paths import RunPaths
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import GenerationStats, QueueState
from penstock import processes, status
from penstock.cli import main
from penstock.processes import Frontend, Lanes, Process, View, Worker


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """An empty run directory beside others; no settings in the environment."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "8080"
    root.mkdir()
    return RunPaths(root, "8080")


def test_without_a_server_the_command_says_so_and_names_others(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    other = paths.root.parent / "9000"
    other.mkdir()
    for name in ("worker-0", "frontend-0"):
        SlotLock(paths.lock(name)).release()
    with SlotLock(other / "server.lock"):
        assert main(["status", "--run-dir", str(paths.root)]) == status.EXIT_NONE
    printed = capsys.readouterr()
    assert printed.out == "" and f"no server runs with the run directory {paths.root}" in printed.err
    assert f"penstock status --run-dir {other}" in printed.err
    assert main(["status", "--run-dir", str(paths.root / "absent"), "--json"]) == status.EXIT_NONE
    assert json.loads(capsys.readouterr().out)["runs"] is False


def test_a_slot_without_holder_is_dead_and_slots_of_an_earlier_run_are_not_shown(paths: RunPaths) -> None:
    for slot in (0, 1, 2):
        SlotLock(paths.lock(f"worker-{slot}")).release()
    for slot in (0, 1):
        paths.notify_socket(slot).touch()
    with SlotLock(paths.lock("supervisor")), SlotLock(paths.lock("worker-0")):
        view = processes.look(paths, 8, 0.05)
    assert [(worker.slot, worker.state) for worker in view.workers] == [(0, "starting"), (1, "dead")]
    assert view.workers[0].process and view.workers[0].process.pid == os.getpid()
    assert view.runs and not view.sound


def test_a_worker_that_gives_no_answer_is_silent(paths: RunPaths) -> None:
    paths.worker_socket(0).touch()
    with SlotLock(paths.lock("worker-0")):
        view = processes.look(paths, 1, 0.05)
    assert [worker.state for worker in view.workers] == ["silent"]


def test_without_a_supervisor_the_settings_tell_the_slots(paths: RunPaths) -> None:
    with SlotLock(paths.lock("server")):
        view = processes.look(paths, 2, 0.05)
    assert [worker.state for worker in view.workers] == ["dead", "dead"]


def test_a_frontend_that_is_silent_for_long_is_stuck() -> None:
    def frontend(silent_s: float | None, *, stopped: bool = False) -> Frontend:
        return Frontend(pid=1, up_s=1.0, slot=0, silent_s=silent_s, stopped=stopped)

    assert not frontend(None).stuck and not frontend(processes.SILENT_S - 1).stuck
    assert frontend(processes.SILENT_S + 1).stuck and frontend(0.0, stopped=True).stuck


def _view() -> View:
    """One worker with a model that answers and one that failed, and one dead slot."""
    process = Process(pid=7, up_s=3700.0)
    models = [
        ModelStatus("org/chat", "loaded", "cuda:0", 3 << 30),
        ModelStatus("org/chat:long", "loaded", "cuda:0", 3 << 30),
        ModelStatus("org/bad", "failed", error_class="OOM", error_message="no room"),
        ModelStatus("org/bad:x", "failed", error_class="OOM", error_message="no room"),
        ModelStatus("org/idle", "available"),
        ModelStatus("org/idle:x", "available"),
    ]
    alive = Worker(
        slot=0, state="serving", restarts=2, process=process, device="A100", requests=5, queued=10, bound=64,
        memory_used=1 << 30, memory_total=2 << 30,
        queues=[QueueState("org/chat", 2, 9, 0.1), QueueState("org/chat:long", 1, 9, 0.1)],
        generations=[GenerationStats("org/chat", 8, 8, 4, 0, 0, 0, 0, 0, 0, 0, 0)], models=models,
    )  # fmt: skip
    return View(
        run_dir="/run/x", arbiter=process, supervisor=None,
        frontends=[Frontend(pid=8, up_s=1.0, slot=0, silent_s=9.0)], workers=[alive, Worker(slot=1, state="dead")],
    )  # fmt: skip


def test_the_lines_tell_processes_models_errors_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [" ".join(line.split()) for line in status.lines_of(_view())]
    assert "arbiter runs 7 1 h 1 min - - - - - -" in rows
    assert "frontend 0 stuck: silent for 9 s 8 1 s - - 0 - - -" in rows
    assert "worker 0 serving 7 1 h 1 min A100 2 5 10/64 1.0 GiB of 2.0 GiB 0 B of 0 B" in rows
    assert "worker 1 dead - - - 0 - - - -" in rows
    assert "org/chat loaded 0 cuda:0 3.0 GiB 7" in rows
    assert rows.count("org/bad on worker 0: OOM: no room") == 1
    assert not any(":long" in row or ":x" in row for row in rows), "profiles like their model are folded"
    assert rows[-1] == "1 more model is available and not loaded"


@pytest.mark.parametrize("pause", ["0", "-1", "nan", "1e9"])
def test_a_pause_that_is_none_is_refused(pause: str, paths: RunPaths) -> None:
    assert main(["status", "--run-dir", str(paths.root), f"--watch={pause}"]) == 3


def test_a_gateway_shows_its_boxes_and_how_items_went_to_them() -> None:
    lanes = Lanes(
        joined=True, boxes=2, others=1, items={"queue": 40, "direct": 2}, resent={"box died": 1, "old": 3}
    )
    view = View(
        run_dir="/run", arbiter=None, supervisor=None, gateway=True, lanes=lanes, frontends=[], workers=[]
    )
    lines = list(status.lines_of(view))
    assert "cluster: a broker is joined; 2 boxes take work, 1 do not" in lines
    assert "items: 40 by the lane queue, 2 by the lane direct; sent again: 1 box died, 3 old" in lines
    view.lanes = Lanes(joined=False, boxes=0, others=0, items={"queue": 0, "direct": 0}, resent={})
    lines = list(status.lines_of(view))
    assert "cluster: no broker is joined; 0 boxes take work" in lines
    assert "items: 0 by the lane queue, 0 by the lane direct; sent again: none" in lines
    view.lanes = None
    assert not any(line.startswith(("cluster", "items")) for line in status.lines_of(view))
