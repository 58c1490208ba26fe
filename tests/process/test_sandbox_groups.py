"""Control groups of sandboxes.

A directory tree stands in for the kernel's where files are only read. Groups are made, entered, killed and removed in a
tree of the kernel, where this process may write to one. Limits need its controllers, which machines with cgroups of
version 1 keep for those.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from ipc import mcp_servers
from ipc.settings import Agent
from tests.fakes.tool_host import until
from tests.harness.sandboxes import Box, found_layers, in_box
from workers.tools import layers
from workers.tools.cgroups import CONTROLLERS, Groups, find, limits_of
from workers.tools.layers import ACTIVE
from workers.tools.transports import Program


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a unit with `Delegate=yes` and `DelegateSubgroup=host` sees."""
    unit = tmp_path / "system.slice" / "tools.service"
    (unit / "host").mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    (unit / "cgroup.controllers").write_text("cpu memory pids\n")
    for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.kill"):
        (unit / name).touch()
    return tmp_path


HOST = "/system.slice/tools.service/host"
UNIT = "system.slice/tools.service"


def test_a_delegated_tree_is_found_and_its_controllers_are_handed_on(tree: Path) -> None:
    groups, reason = find(Agent(), tree, HOST)
    assert groups is not None
    assert reason == ""
    assert (tree / UNIT / "cgroup.subtree_control").read_text() == "", "to find changes nothing"
    groups.take()
    assert (tree / UNIT / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_each_obstacle_is_named(tree: Path, tmp_path: Path) -> None:
    def why(group: str = HOST) -> str:
        groups, reason = find(Agent(), tree, group)
        assert groups is None
        return reason

    unit = tree / UNIT
    assert why("/") == "this process is in the root group"
    assert why("/gone/host").startswith("the group of this process cannot be read: No such file")
    (unit / "cgroup.procs").write_text("12\n")
    assert why() == "the delegated group has processes of its own (DelegateSubgroup= of systemd 254)"
    (unit / "cgroup.procs").write_text("")
    (unit / "cgroup.kill").unlink()
    assert why() == "the kernel has no cgroup.kill, which came with Linux 5.14"
    (unit / "cgroup.controllers").write_text("pids hugetlb\n")
    assert why() == "the delegated group lacks the controllers cpu, memory"
    (unit / "cgroup.procs").unlink()
    assert why() == "the parent of the group of this process is not delegated (Delegate= of systemd)"
    (tree / "cgroup.controllers").unlink()
    assert why() == f"no cgroups of version 2 at {tree}"


def test_limits_follow_the_settings() -> None:
    assert limits_of(Agent(max_memory_bytes=1 << 30, max_procs=7, max_cores=0.5)) == {
        "memory.max": str(1 << 30),
        "memory.swap.max": "0",
        "pids.max": "7",
        "cpu.max": "50000 100000",
    }


def test_a_group_bounds_processes_of_root_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    chosen = layers.Layers(Agent(), layers.Python("/usr/bin/python3", ()), bwrap="/usr/bin/bwrap")
    chosen.judge_processes()
    assert chosen.states["processes"].startswith("the limit does not bind root")
    chosen.groups = Groups(Path("/nowhere"), {})
    chosen.judge_processes()
    assert chosen.states["processes"] == ACTIVE
    chosen.take_groups()
    assert chosen.groups is None
    assert chosen.states["cgroup"] == "the kernel refuses: No such file or directory"
    assert chosen.states["processes"].startswith("the limit does not bind root")


class Kernel(NamedTuple):
    """A group of the kernel's tree for one test, and what can be bounded there."""

    place: Path
    groups: Groups
    is_whole: bool

    def sandboxes(self) -> list[Path]:
        """The groups of sandboxes that there are."""
        return list(self.place.glob("sandbox-*/"))


CONFIG = Agent(code_execution=True, shell=True, max_procs=20)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """A group in the tree of cgroups of version 2, wherever that is mounted; removed afterwards."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    tree = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
    if tree is None:
        pytest.skip("no tree of cgroups of version 2 is mounted")
    place = tree / f"penstock-test-{secrets.token_hex(4)}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"this user has no writable tree of cgroups of version 2: {error.strerror}")
    try:
        found = tuple((place / "cgroup.controllers").read_text().split())
        is_whole = {*CONTROLLERS} <= {*found}
        controllers = CONTROLLERS if is_whole else found
        groups = Groups(place, limits_of(CONFIG) if is_whole else {}, controllers)
        groups.take()
        assert {*(place / "cgroup.subtree_control").read_text().split()} == {*controllers}
        yield Kernel(place, groups, is_whole)
        assert not list(place.glob("*/")), "a group was left"
    finally:
        for left in place.glob("*/"):
            left.rmdir()
        place.rmdir()


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_all_that_a_sandbox_runs_is_in_its_group_which_ends_with_the_sandbox(
    tmp_path: Path, kernel: Kernel, mode: str
) -> None:
    async def body(box: Box) -> None:
        seen = (await box.python("open('/proc/self/cgroup').read()")).result
        (group,) = kernel.sandboxes()
        assert group.name in seen
        other = Box(box.sandboxes, "other")
        assert group.name in (await box.shell("cat /proc/self/cgroup")).stdout
        assert group.name not in (await other.shell("cat /proc/self/cgroup")).stdout
        assert len(kernel.sandboxes()) == 2
        assert "cgroup" not in (await box.shell("ls -l /proc/self/fd")).stdout, (
            "code could enter other groups"
        )

    in_box(tmp_path / "work", replace(found_layers(sandbox=mode), groups=kernel.groups), body)
    assert kernel.sandboxes() == []


def test_the_end_of_a_group_kills_what_has_left_every_other_bond(kernel: Kernel) -> None:
    group = kernel.groups.make()
    with subprocess.Popen(["sleep", "4718"], start_new_session=True) as process:
        os.write(group.entry, str(process.pid).encode())
        asyncio.run(group.end())
        assert process.wait(30) == -9
    assert kernel.sandboxes() == []


def test_a_program_that_is_an_mcp_server_has_a_group_of_its_own(tmp_path: Path, kernel: Kernel) -> None:
    chosen = replace(found_layers(), groups=kernel.groups)
    program = Program(mcp_servers.Process(command="/bin/cat"), chosen, tmp_path)
    program.session = SimpleNamespace(end=lambda _: None)  # type: ignore[assignment]

    async def body() -> None:
        await program.open()
        await until(
            lambda: any("populated 1" in (each / "cgroup.events").read_text() for each in kernel.sandboxes())
        )
        await program.close()

    asyncio.run(body())
    assert kernel.sandboxes() == []


def test_a_host_removes_the_groups_that_a_killed_one_has_left(kernel: Kernel) -> None:
    left = kernel.groups.make()
    with subprocess.Popen(["sleep", "4719"]) as process:
        os.write(left.entry, str(process.pid).encode())
        os.close(left.entry)
        kernel.groups.take()
        assert process.wait(30) == -9
    assert kernel.sandboxes() == []


def test_a_group_bounds_memory_and_processes(tmp_path: Path, kernel: Kernel) -> None:
    if not kernel.is_whole:
        pytest.skip("the tree lacks controllers: cgroups of version 1 have them on this machine")
    fork = "import os, signal\nn = 0\ntry:\n  while n < 100:\n    os.fork() or signal.pause()\n    n += 1\n"
    fork += "except OSError: pass\nn"
    # Many processes below the limit of each take more memory than the group may.
    memory = "import os\nfor _ in range(10):\n  if not os.fork(): bytearray(300 << 20); os._exit(0)\n"
    memory += "codes = [os.wait()[1] for _ in range(10)]\n9 in codes"

    async def body(box: Box) -> None:
        assert int((await box.python(fork)).result) < CONFIG.max_procs
        await box.python("import os, signal; os.kill(-1, signal.SIGKILL)")
        answer = await box.python(memory)
        assert answer.killed or answer.result == "True"

    in_box(tmp_path / "work", replace(found_layers(), groups=kernel.groups), body)
