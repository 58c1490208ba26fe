"""The command line of a sandbox, and what is said where layers are missing."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipc.errors import MachineUnfit
from ipc.settings import Agent
from workers.tools import layers
from workers.tools.cgroups import Groups
from workers.tools.layers import ACTIVE, LAYERS, REQUIRED, Layers, Python


def made(bwrap: str = "/usr/bin/bwrap", **settings: Any) -> Layers:
    python = Python("/opt/venv/bin/python", ("/opt/venv",))
    return Layers(Agent(**settings), python, dict.fromkeys(LAYERS, ACTIVE), bwrap, program=b"12345678")


def command(chosen: Layers, mode: str = "python", cpu_s: float = 1.0) -> list[str]:
    return chosen.command(Path("/var/tmp/box"), 9, mode, cpu_s)


def test_only_the_work_directory_and_system_directories_are_bound() -> None:
    words = command(made())
    bound = {words[at + 1] for at, word in enumerate(words) if word in ("--bind", "--ro-bind")}
    assert "/var/tmp/box" in bound
    assert words[words.index("--bind") + 1 : words.index("--bind") + 3] == ["/var/tmp/box", layers.WORK]
    assert not bound & {
        "/",
        "/run",
        "/tmp",
        "/var",
        "/home",
        "/root",
        "/etc",
        "/proc",
        "/dev",
        "/sys",
        "/opt",
    }
    assert words.count("--bind") == 1, "a second directory could be written"


@pytest.mark.parametrize(("network", "unshared"), [("none", True), ("loopback", True), ("full", False)])
def test_the_network_is_the_sandboxs_own_unless_the_operator_says_full(network: str, unshared: bool) -> None:
    words = command(made(sandbox_network=network))
    assert ("--unshare-net" in words) == unshared
    assert {"--unshare-user", "--disable-userns", "--unshare-pid", "--die-with-parent"} <= {*words}


def test_an_empty_proc_takes_the_place_of_one_that_cannot_be_mounted() -> None:
    chosen = made()
    chosen.fresh_proc = False
    words = command(chosen)
    assert "--proc" not in words
    assert words[words.index("/proc", words.index("--tmpfs") - 1) - 1] == "--tmpfs"


def test_limits_follow_the_settings_and_the_time_of_a_call() -> None:
    limits = command(made(max_procs=7, max_memory_bytes=1 << 30, max_cpu_s=10), cpu_s=600)[-5]
    assert limits == f"as={1 << 30},cpu=601,nofile=1024,fsize={256 << 20},core=0,nproc=7"
    assert "nproc" not in command(made(bwrap=""))[-5], "the limit would count the server's own processes"


def test_without_bubblewrap_landlock_forbids_connections_unless_the_network_is_full() -> None:
    assert command(made(bwrap=""))[-2] == "1"
    assert command(made(bwrap="", sandbox_network="full"))[-2] == ""


def test_without_bubblewrap_the_devices_and_shared_memory_of_the_host_cannot_be_written() -> None:
    writable = command(made(bwrap=""))[-3].split(":")
    assert writable[0] == "/var/tmp/box"
    assert {*writable[1:]} == {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}


def test_a_shell_starts_without_the_packages_of_the_interpreter() -> None:
    assert "-S" in command(made(), "shell")
    assert "-S" not in command(made(), "python")


def test_the_start_of_a_shell_imports_no_module_that_takes_long() -> None:
    allows_all = "060000000000ff7f"
    near, far = socket.socketpair()
    flags = ("-I", "-S", "-X", "importtime")
    given = ("probe", str(far.fileno()), "", "nofile=99", "", "", "", allows_all)
    with near, far:
        run = subprocess.run(
            [sys.executable, *flags, str(layers.INNER), *given],
            pass_fds=(far.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert near.recv(5)[4:] == b"R"
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert {"_ctypes", "resource"} <= imported
    assert imported.isdisjoint({"ctypes", "enum", "json", "re", "site", "struct"})


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bubblewrap that the kernel refuses user namespaces."""
    script(tmp_path / "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_refused_namespace_is_named_and_the_other_layers_stay(refusing: None) -> None:
    found = layers.find(Agent(code_execution=True))
    assert found.states["namespaces"] == "bwrap: No permissions to create new namespace"
    assert not found.isolated
    assert {found.states[name] for name in ("network", "processes", "proc")} == {"needs namespaces"}
    assert found.states["limits"] == ACTIVE


def test_on_refuses_and_names_each_missing_layer(refusing: None) -> None:
    with pytest.raises(
        MachineUnfit, match=r"layers are missing: namespaces \(bwrap: No permissions.*; network"
    ):
        layers.find(Agent(code_execution=True, sandbox="on"))


def test_off_applies_no_layer(refusing: None) -> None:
    found = layers.find(Agent(code_execution=True, sandbox="off"))
    assert set(found.states.values()) == {"off by agent.sandbox"}
    assert command(found)[-5:] == ["", "", "", "1", ""]
    assert {*REQUIRED} < {*LAYERS}


def test_a_group_that_the_kernel_refuses_is_fatal_with_on_where_the_limit_of_processes_needs_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    chosen = made(sandbox="on")
    chosen.groups = Groups(Path("/nowhere"), {})
    with pytest.raises(MachineUnfit, match=r"layers are missing: processes \(the limit does not bind root"):
        chosen.take_groups()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    chosen.groups = Groups(Path("/nowhere"), {})
    chosen.take_groups()
    assert chosen.states["processes"] == ACTIVE
