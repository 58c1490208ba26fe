"""Removes the leftovers of dead processes: arenas, sockets and metric files of slots whose lock is free.

The sweeper holds the lock of a slot while it sweeps the slot, and removes an arena only if no process holds the arena's
lock: files of a live owner stay. Runs when a process takes a slot, when the server starts and stops, and on demand.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ipc.processes.liveness import SlotLock, SlotTaken, is_held, kill_sandboxes
from ipc.processes.paths import INPUT_OWNERS, SERVER, TOOLS, RunPaths, arena_owner, remove_tree
from ipc.store import store

_LOCK_NAME = re.compile(r"^(worker|frontend)-(\d+)\.lock$")


def sweep_slot(paths: RunPaths, slot: int) -> list[str]:
    """Remove arenas and sockets of earlier lives of a worker slot; the caller must hold its lock. Returns the names."""
    return _unlink([*_ownerless(paths, slot), paths.worker_socket(slot)])


def sweep_inputs(paths: RunPaths, name: str) -> list[str]:
    """Remove the input arenas of earlier lives of `frontend-0`, `bridge-0` or another. Returns the names.

    The caller must hold the lock of that name.
    """
    return _unlink(_ownerless(paths, arena_owner(name)))


def _ownerless(paths: RunPaths, slot: int | str = "*") -> list[Path]:
    """Arenas of dead owners. A live owner may have a slot in another run directory of the same instance."""
    return [path for path in paths.arenas(slot) if not is_held(path)]


def _unlink(files: list[Path]) -> list[str]:
    """Remove the `files` that exist; returns their names."""
    leftovers = [path for path in files if path.exists() or path.is_socket()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return [path.name for path in leftovers]


def sweep(paths: RunPaths) -> list[str]:
    """Sweep every free worker slot of this instance, and the metric files when no slot at all is held.

    Raises `OSError` where the run directory is no directory or may not be read.
    """
    if not paths.root.exists():
        return _unlink(_ownerless(paths))
    slots = {
        int(lock[2])
        for path in paths.root.glob("*.lock")
        if (lock := _LOCK_NAME.match(path.name)) and lock[1] == "worker"
    }
    owners = {path.name.split(".")[2] for path in paths.arenas()}
    slots |= {int(owner) for owner in owners if _is_slot(owner)}
    removed: list[str] = []
    for slot in sorted(slots):
        try:
            with SlotLock(paths.lock(f"worker-{slot}")):
                removed += sweep_slot(paths, slot)
                paths.notify_socket(slot).unlink(missing_ok=True)
        except SlotTaken:
            continue
    inputs = [owner for owner in owners if owner[:1] in INPUT_OWNERS and _is_slot(owner[1:])]
    for name in sorted(f"{INPUT_OWNERS[owner[0]]}-{int(owner[1:])}" for owner in inputs):
        try:
            with SlotLock(paths.lock(name)):
                removed += sweep_inputs(paths, name)
        except SlotTaken:
            continue
    removed += _sweep_tools(paths)
    _sweep_metrics(paths)
    return removed


def _sweep_metrics(paths: RunPaths) -> None:
    """Remove the metric files and the start-up marks where no process has a slot, but for the arbiter.

    A process that takes a slot meanwhile keeps its files: the sweeper holds every lock that is there, and files that
    came later stay.
    """
    left = [*paths.metrics().glob("*"), *_marks(paths)]
    with contextlib.ExitStack() as held:
        try:
            for path in paths.root.iterdir():
                if path.suffix == ".lock" and path != paths.lock(SERVER):
                    held.enter_context(SlotLock(path))
        except SlotTaken:
            return
        _unlink(left)


def _sweep_tools(paths: RunPaths) -> list[str]:
    """Remove sockets and work directories of a dead tool host."""
    work = paths.tools_work()
    if not (paths.lock(TOOLS).exists() or work.exists()):
        return []
    try:
        with SlotLock(paths.lock(TOOLS)):
            swept = [work.name] if work.exists() else []
            kill_sandboxes(work)
            remove_tree(work)
            return swept + _unlink([paths.tools_socket(), paths.tools_notify_socket()])
    except SlotTaken:
        return []


def _is_slot(text: str) -> bool:
    # NOTE: other users may put files into the same directory, and `isdigit` alone takes a superscript.
    return text.isascii() and text.isdigit() and len(text) <= 4


def _marks(paths: RunPaths) -> list[Path]:
    """Files that say which start-up blocks were printed."""
    return [paths.announced(stage) for stage in ("first", "ready", "failure")]


def forget(paths: RunPaths, dirs: Collection[str] = ()) -> None:
    """The server starts: drop regions, loads by name, the start-up marks and the own models of the run before.

    `dirs` are the catalog directories and the repositories of this run.
    """
    for directory in paths.own_models().glob("*"):
        if str(directory) not in dirs:
            shutil.rmtree(directory, ignore_errors=True)
    store.begin(paths)
    _unlink([*_marks(paths), *paths.control().iterdir()])
    # The directories stay, since a process that starts meanwhile relies on them.
    for path in paths.wishes().glob("*"):
        remove_tree(path)
