"""What the dead left is removed; what the living hold is not touched."""

from __future__ import annotations

import contextlib
import socket
import stat
import time
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from ipc.memory.arena import Arena
from ipc.processes.liveness import SLOT_WAIT_S, SlotLock, SlotTaken, take_slot
from ipc.processes.paths import SERVER, RunPaths, prepare_run_dir
from ipc.sweep import _unlink, forget, sweep, sweep_slot


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A prepared run directory with a private directory for arenas."""
    (tmp_path / "shm").mkdir()
    made = RunPaths(tmp_path / "run", "test", tmp_path / "shm")
    prepare_run_dir(made)
    return made


def leave(paths: RunPaths, slot: int, epochs: int = 1) -> set[str]:
    """The files of a worker that was killed; returns the names of what a sweep removes."""
    names = []
    for epoch in range(epochs):
        path = paths.arena(slot, f"{epoch:016x}")
        path.write_bytes(b"arena")
        names.append(path.name)
    for path in (paths.worker_socket(slot), paths.notify_socket(slot)):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    paths.lock(f"worker-{slot}").touch()
    return {*names, paths.worker_socket(slot).name}


def files(directory: Path) -> set[str]:
    """Names of everything but locks."""
    return {path.name for path in directory.iterdir() if path.is_socket() or path.suffix not in (".lock", "")}


def test_leftovers_of_dead_workers_go(paths: RunPaths) -> None:
    left = leave(paths, 0, epochs=3) | leave(paths, 7)
    assert set(sweep(paths)) == left
    assert not list(paths.shm.iterdir())
    assert not files(paths.root)
    assert sweep(paths) == []


def test_a_live_worker_keeps_everything(paths: RunPaths) -> None:
    leave(paths, 0)
    dead = leave(paths, 1)
    with SlotLock(paths.lock("worker-0")):
        assert set(sweep(paths)) == dead
        assert paths.arena(0, f"{0:016x}").exists()
        assert paths.worker_socket(0).is_socket()
        assert paths.notify_socket(0).is_socket()


def test_arenas_without_a_lock_file_are_found_too(paths: RunPaths) -> None:
    arena = paths.arena(3, "f" * 16)
    arena.write_bytes(b"x")
    assert sweep(paths) == [arena.name]


def test_a_sweep_with_another_run_directory_sees_a_live_owner(paths: RunPaths, tmp_path: Path) -> None:
    elsewhere = RunPaths(tmp_path / "other", "test", paths.shm)
    arena = Arena(paths.arena(0, "f" * 16), 1 << 20, "f" * 16)
    assert sweep(elsewhere) == []
    prepare_run_dir(elsewhere)
    assert sweep(elsewhere) == []
    with SlotLock(elsewhere.lock("worker-0")):
        assert sweep_slot(elsewhere, 0) == []
    assert arena.path.exists()
    arena.view.release()
    del arena
    assert sweep(elsewhere) == [f"penstock.test.0.{'f' * 16}"]


def test_the_arbiter_that_sweeps_is_no_reason_to_keep_metric_files(paths: RunPaths) -> None:
    metric = paths.metrics() / "counter_worker-0.db"
    metric.write_bytes(b"x")
    with SlotLock(paths.lock(SERVER)):
        sweep(paths)
    assert not metric.exists()


def test_arenas_go_even_when_the_run_directory_is_gone(paths: RunPaths, tmp_path: Path) -> None:
    arena = paths.arena(0, "f" * 16)
    arena.write_bytes(b"x")
    elsewhere = RunPaths(tmp_path / "gone", "test", paths.shm)
    assert sweep(elsewhere) == [arena.name]
    assert not (tmp_path / "gone").exists()


def test_other_instances_and_foreign_files_are_left_alone(paths: RunPaths) -> None:
    foreign = ["penstock.other.0.ffff", "penstock.test2.0.ffff", "penstock", "something"]
    for name in foreign:
        (paths.shm / name).write_bytes(b"x")
    (paths.root / "worker-0.sock.old").write_bytes(b"x")
    leave(paths, 0)
    sweep(paths)
    assert {path.name for path in paths.shm.iterdir()} == set(foreign)
    assert (paths.root / "worker-0.sock.old").exists()


def test_one_slot_is_swept_alone(paths: RunPaths) -> None:
    mine, others = leave(paths, 1), leave(paths, 11)
    with SlotLock(paths.lock("worker-1")):
        assert set(sweep_slot(paths, 1)) == mine
    assert {path.name for path in paths.shm.iterdir()} <= others
    assert paths.worker_socket(11).is_socket()


def test_metric_files_go_only_when_nobody_is_alive(paths: RunPaths) -> None:
    metric = paths.metrics() / "counter_worker-0.db"
    for name in ("worker-0", "frontend-0", "supervisor"):
        metric.write_bytes(b"x")
        with SlotLock(paths.lock(name)):
            sweep(paths)
            assert metric.exists(), name
    sweep(paths)
    assert not metric.exists()
    assert paths.metrics().is_dir()


@pytest.mark.parametrize("known", [True, False], ids=["lock-of-an-earlier-life", "first-life"])
def test_a_worker_that_starts_during_a_sweep_keeps_its_metric_files(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The worker starts after the sweeper has looked at the last lock, before files go."""
    old, new = paths.metrics() / "counter_worker-1.db", paths.metrics() / "counter_worker-0.db"
    old.write_bytes(b"x")
    if known:
        paths.lock("worker-0").touch()
    taken: list[SlotLock] = []

    def start_first(files: list[Path]) -> list[str]:
        if old in files:
            with contextlib.suppress(SlotTaken):
                taken.append(SlotLock(paths.lock("worker-0")))
                new.write_bytes(b"x")
        return _unlink(files)

    monkeypatch.setattr("ipc.sweep._unlink", start_first)
    sweep(paths)
    assert not old.exists()
    assert bool(taken) is not known
    with contextlib.nullcontext() if taken else SlotLock(paths.lock("worker-0")):
        assert new.exists() is bool(taken)


def test_directories_that_a_starting_process_relies_on_outlast_a_sweep(paths: RunPaths) -> None:
    shared = (paths.metrics(), paths.wishes(), paths.control(), paths.store())
    for directory in shared:
        (directory / "old").touch()
    (paths.wishes() / "model" / "1").mkdir(parents=True)
    before = {directory: directory.stat().st_ino for directory in shared}
    sweep(paths)
    forget(paths)
    assert {directory: directory.stat().st_ino for directory in shared} == before
    assert not any([*paths.metrics().iterdir(), *paths.wishes().iterdir()])


def test_a_process_that_starts_outwaits_a_sweep_but_no_live_owner(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper, clock = SlotLock(paths.lock("bridge-0")), [0.0]

    def pause(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > SLOT_WAIT_S / 2:
            sweeper.release()

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", pause)
    with take_slot(paths.lock("bridge-0")), pytest.raises(SlotTaken):
        take_slot(paths.lock("bridge-0"))
    assert SLOT_WAIT_S <= clock[0] <= 2 * SLOT_WAIT_S


def test_a_sweep_leaves_the_locks_free(paths: RunPaths) -> None:
    leave(paths, 0)
    sweep(paths)
    with SlotLock(paths.lock("worker-0")):
        pass


def test_a_start_keeps_only_the_own_models_that_it_serves(paths: RunPaths) -> None:
    for name in ("served", "of-an-earlier-start"):
        (paths.own_models() / name).mkdir(parents=True)
        (paths.own_models() / name / "0.yaml").touch()
    forget(paths, (str(paths.own_models() / "served"), "config/models"))
    assert [path.name for path in paths.own_models().iterdir()] == ["served"]


def test_a_run_directory_that_lets_others_in_is_closed_and_the_longest_path_is_taken(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    prepare_run_dir(RunPaths(tmp_path / "open", "test"))
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o700
    room = 107 - len(str(RunPaths(tmp_path / "", "test").notify_socket(999)))
    longest = RunPaths(tmp_path / ("x" * (room - 1)), "test")
    prepare_run_dir(longest)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(longest.notify_socket(999)))
    with pytest.raises(ConfigError, match="is too long: a socket name may have 107 bytes"):
        prepare_run_dir(RunPaths(tmp_path / ("x" * room), "test"))


@pytest.mark.parametrize(
    "owner", ["fx", "f", "x", "0x", "f-1", "\u0663", "f\u00b2", "\u00b2", "1" * 200, "f" + "1" * 200]
)
def test_files_of_others_in_the_place_of_arenas_are_left_alone(paths: RunPaths, owner: str) -> None:
    foreign = paths.shm / f"penstock.test.{owner}.y"
    foreign.touch()
    left = leave(paths, 0)
    assert set(sweep(paths)) == left
    assert foreign.exists()
