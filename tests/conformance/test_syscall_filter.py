"""What the servers are built on runs under the system call filter of their units."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.required_tool import required_tool
from tools.source_tree import ROOT

UNITS = ("penstock-frontend.service", "penstock-worker@.service")
ROUND_TRIP = """
import asyncio, fcntl, mmap, os, sys, uvloop, zmq

path = sys.argv[1]
context = zmq.Context()
router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
router.bind(f"ipc://{path}/worker.sock")
dealer.connect(f"ipc://{path}/worker.sock")
dealer.send(b"ping")
router.send_multipart(router.recv_multipart())
assert dealer.recv() == b"ping"
arena = os.open(f"{path}/arena", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
fcntl.flock(arena, fcntl.LOCK_EX)
os.posix_fallocate(arena, 0, 1 << 20)
mmap.mmap(arena, 1 << 20)
os.close(os.pidfd_open(os.getppid()))
uvloop.new_event_loop().run_until_complete(asyncio.sleep(0))
print("served")
"""


@functools.cache
def call_sets() -> dict[str, list[str]]:
    """systemd's named groups of system calls, members as listed: names, and other groups with an @."""
    command = [required_tool("systemd-analyze"), "syscall-filter", "--no-pager"]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    groups: dict[str, list[str]] = {}
    members: list[str] = []
    for line in lines:
        if line.startswith("@"):
            members = groups.setdefault(line.strip(), [])
        elif line.startswith("#"):
            members = []
        elif line.strip() and not line.strip().startswith("#"):
            members.append(line.strip())
    return groups


def allowed_calls(unit: str, groups: dict[str, list[str]]) -> set[str]:
    """The calls that the SystemCallFilter= lines of a unit leave, read in their order."""

    def expand(name: str) -> set[str]:
        return (
            {call for member in groups[name] for call in expand(member)} if name.startswith("@") else {name}
        )

    allowed = expand("@default")
    for line in (ROOT / "deploy" / "systemd" / unit).read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "SystemCallFilter":
            calls = {call for name in value.removeprefix("~").split() for call in expand(name)}
            allowed = allowed - calls if value.startswith("~") else allowed | calls
    return allowed


def serve_under(calls: set[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the round trip with only these calls allowed."""
    allowed = directory / "allowed"
    allowed.write_text("\n".join(sorted(calls)))
    program = [sys.executable, str(ROOT / "tests/fakes/syscall_filter.py"), str(allowed), sys.executable]
    command = [*program, "-c", ROUND_TRIP, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("unit", UNITS)
def test_sockets_shared_memory_and_event_loop_work(unit: str, tmp_path: Path) -> None:
    done = serve_under(allowed_calls(unit, call_sets()), tmp_path)
    assert done.stdout == "served\n", done.stderr


def test_zeromq_needs_to_set_the_scheduling_policy(tmp_path: Path) -> None:
    done = serve_under(allowed_calls(UNITS[0], call_sets()) - {"sched_setscheduler"}, tmp_path)
    assert done.returncode != 0
    assert "Operation not permitted" in done.stderr


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "call", ["bpf", "chroot", "mount", "ptrace", "reboot", "setuid", "swapon", "init_module"]
)
def test_privileged_calls_are_refused(unit: str, call: str) -> None:
    allowed = allowed_calls(unit, call_sets())
    assert "read" in allowed
    assert call not in allowed
