"""Control groups: memory, processes and processors of each sandbox, where a tree is delegated to the tool host.

1. `find` looks at the group of this process in the tree of cgroups, version 2. Its parent must be delegated to the user
   of the host, and have no processes of its own: `Delegate=yes` and `DelegateSubgroup=` of systemd make this so.
2. `Groups.take` hands the controllers on to the groups below, and removes groups that a killed host has left.
3. Each sandbox has a `Group`. `workers.tools.inner` enters the group as its first step, so that all that a sandbox runs
   counts. bubblewrap itself stays in the group of the host.
4. `Group.end` kills the processes that are left, and removes the group.

The files are those of the kernel's documentation, admin-guide/cgroup-v2. `cgroup.kill` came with Linux 5.14.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ipc.settings import Agent

log = logging.getLogger(__name__)

TREE = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory", "pids")
_PERIOD_US = 100_000
_PREFIX = "sandbox-"
_EMPTY_S = 5.0
"""Longest wait for processes of a group that were killed."""
_LOOK_EVERY_S = 0.002


class Group:
    """The group of one sandbox. `entry` is a descriptor: a process that writes "0" there enters the group."""

    def __init__(self, place: Path, limits: Mapping[str, str]) -> None:
        """Make the group. Raises `OSError`."""
        place.mkdir()
        self._place = place
        try:
            for name, value in limits.items():
                _write(place / name, value)
            self.entry = os.open(place / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            place.rmdir()
            raise

    async def end(self) -> None:
        """Kill all processes of the group and remove the group. A failure is logged."""
        os.close(self.entry)
        try:
            for wait_s in _kill(self._place):
                await asyncio.sleep(wait_s)
        except OSError as error:
            log.warning("the control group of a sandbox stays: %s", error.strerror)


def _kill(place: Path) -> Iterator[float]:
    """Kill a group and remove it; the pauses until its processes have gone. Raises `OSError`."""
    _write(place / "cgroup.kill", "1")
    until = time.monotonic() + _EMPTY_S
    while "populated 1" in (place / "cgroup.events").read_text() and time.monotonic() < until:
        yield _LOOK_EVERY_S
    place.rmdir()


class Groups:
    """The delegated tree: `place` has the group of the host and those of the sandboxes."""

    def __init__(
        self, place: Path, limits: Mapping[str, str], controllers: tuple[str, ...] = CONTROLLERS
    ) -> None:
        """`limits` are the values of files of each group."""
        self._place, self._limits, self._controllers = place, limits, controllers

    def take(self) -> None:
        """Enable the controllers, and end the groups of an earlier host. Raises `OSError`."""
        _write(self._place / "cgroup.subtree_control", " ".join(f"+{name}" for name in self._controllers))
        for left in self._place.glob(f"{_PREFIX}*/"):
            with contextlib.suppress(OSError):
                for wait_s in _kill(left):
                    time.sleep(wait_s)

    def make(self) -> Group:
        """The group of a new sandbox. Raises `OSError`."""
        return Group(self._place / f"{_PREFIX}{secrets.token_hex(8)}", self._limits)


def limits_of(config: Agent) -> dict[str, str]:
    """The files of a group and their values, by the settings."""
    return {
        "memory.max": str(config.max_memory_bytes),
        "memory.swap.max": "0",
        "pids.max": str(config.max_procs),
        "cpu.max": f"{max(1000, round(config.max_cores * _PERIOD_US))} {_PERIOD_US}",
    }


def find(config: Agent, tree: Path = TREE, group: str = "") -> tuple[Groups | None, str]:
    """The delegated tree, or None and why there is none. `group` is that of this process; empty asks the kernel.

    Nothing is changed.
    """
    try:
        group = group or _own_group()
        place = (tree / group.strip("/")).parent
        if not (tree / "cgroup.controllers").exists():
            return None, f"no cgroups of version 2 at {tree}"
        if not group.strip("/"):
            return None, "this process is in the root group"
        return _judged(config, place)
    except OSError as error:
        return None, f"the group of this process cannot be read: {error.strerror}"


def _judged(config: Agent, place: Path) -> tuple[Groups | None, str]:
    files = (place, place / "cgroup.procs", place / "cgroup.subtree_control")
    missing = {*CONTROLLERS} - {*(place / "cgroup.controllers").read_text().split()}
    if not all(os.access(each, os.W_OK) for each in files):
        return None, "the parent of the group of this process is not delegated (Delegate= of systemd)"
    if missing:
        return None, f"the delegated group lacks the controllers {', '.join(sorted(missing))}"
    if (place / "cgroup.procs").read_text().strip():
        return None, "the delegated group has processes of its own (DelegateSubgroup= of systemd 254)"
    if not (place / "cgroup.kill").exists():
        return None, "the kernel has no cgroup.kill, which came with Linux 5.14"
    return Groups(place, limits_of(config)), ""


def _own_group() -> str:
    """The path of this process in the tree of version 2; "/" for the root. Raises `OSError`."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:]
    return "/"


def _write(file: Path, text: str) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
