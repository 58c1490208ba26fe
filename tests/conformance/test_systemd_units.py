"""The units in deploy/ load without a warning, stay within their exposure limits, and create what they need."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conformance.required_tool import required_tool
from tools.source_tree import ROOT

DEPLOY = ROOT / "deploy"
COMMANDS = (
    "opt/penstock/venv/bin/penstock",
    "opt/penstock/venv/bin/python",
    "bin/kill",
    "usr/sbin/nats-server",
)
EXPOSURE_LIMITS = {
    "penstock-frontend.service": 2.5,
    "penstock-worker@0.service": 4.5,
    "penstock-tools.service": 4.0,
    "penstock-gateway.service": 2.5,
    "penstock-bridge.service": 2.5,
    "penstock-nats.service": 2.5,
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, its output as text."""
    environment = {**os.environ, "SYSTEMD_COLORS": "0", "SYSTEMD_EMOJI": "0"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small root directory with our units, the system's own, and stand-ins for the programs they start."""
    for name in COMMANDS:
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    for source, target in (
        (Path("/usr/lib/systemd/system"), "usr/lib/systemd/system"),
        (DEPLOY / "systemd", "etc/systemd/system"),
        (DEPLOY / "sysusers.d", "usr/lib/sysusers.d"),
        (DEPLOY / "tmpfiles.d", "usr/lib/tmpfiles.d"),
    ):
        if source.is_dir():
            shutil.copytree(source, tmp_path / target, symlinks=True)
    return tmp_path


def verify(root: Path) -> str:
    """What `systemd-analyze verify` has to say; empty when all is well."""
    units = (
        "penstock.target",
        "penstock-frontend.service",
        "penstock-worker@0.service",
        "penstock-tools.service",
        "penstock-gateway.service",
        "penstock-bridge.service",
        "penstock-nats.service",
    )
    done = run(required_tool("systemd-analyze"), "verify", f"--root={root}", "--man=no", *units)
    # A systemd before 254 does not know the directive, and ignores it.
    told = [each for each in done.stderr.splitlines() if "'DelegateSubgroup' in section" not in each]
    return "\n".join(told).strip() or ("" if done.returncode == 0 else f"exit status {done.returncode}")


def exposure(root: Path, unit: str, limit: float) -> subprocess.CompletedProcess[str]:
    """`systemd-analyze security` of a unit file; a non-zero status when it is above the limit."""
    options = ("--offline=true", f"--root={root}", "--no-pager", f"--threshold={round(limit * 10)}")
    return run(required_tool("systemd-analyze"), "security", *options, unit)


def test_units_load_without_a_warning(root: Path) -> None:
    assert verify(root) == ""


def lines(unit: str, name: str) -> list[str]:
    """Values of a directive in a unit as shipped."""
    text = (DEPLOY / "systemd" / unit).read_text()
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


def test_frontends_are_not_held_back_until_workers_have_loaded() -> None:
    # A worker is Type=notify and ready when its models are, so any order between the two would do that.
    for name in ("After", "Before", "Requires", "BindsTo", "Requisite"):
        assert not [value for value in lines("penstock-worker@.service", name) if "frontend" in value]
        assert not [value for value in lines("penstock-frontend.service", name) if "worker" in value]


def test_the_tool_host_sees_neither_keys_nor_state_and_may_make_its_sandboxes() -> None:
    unit = "penstock-tools.service"
    hidden = lines(unit, "InaccessiblePaths")[0].split()
    assert {"-/etc/penstock/keys.yaml", "-/var/lib/penstock"} <= {*hidden}
    for name in ("RestrictNamespaces", "ProtectKernelTunables", "ProtectKernelLogs", "PrivateNetwork"):
        assert lines(unit, name) == [], f"{name} keeps bubblewrap from its start"
    assert "@mount" in lines(unit, "SystemCallFilter")[0]


@pytest.mark.parametrize(
    "unit",
    [
        "penstock-frontend.service",
        "penstock-worker@.service",
        "penstock-tools.service",
        "penstock-gateway.service",
        "penstock-bridge.service",
    ],
)
def test_a_wrong_configuration_is_found_by_the_main_process_whose_exit_status_prevents_a_restart(
    unit: str,
) -> None:
    assert lines(unit, "RestartPreventExitStatus") == ["3"]
    assert lines(unit, "ExecStartPre") == []


def test_the_arbiter_replaces_a_stuck_frontend_before_the_watchdog_ends_the_whole_server() -> None:
    found = re.search(r"^timeout = (\d+)$", (ROOT / "gunicorn.conf.py").read_text(), re.MULTILINE)
    assert found is not None
    # The arbiter looks every second, and needs a second signal for a process that is stopped.
    assert int(lines("penstock-frontend.service", "WatchdogSec")[0]) >= int(found[1]) + 10


def test_a_misspelt_directive_is_noticed(root: Path) -> None:
    unit = root / "etc/systemd/system/penstock-frontend.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in verify(root)


@pytest.mark.parametrize(("unit", "limit"), EXPOSURE_LIMITS.items())
def test_exposure_stays_below_its_limit(root: Path, unit: str, limit: float) -> None:
    done = exposure(root, unit, limit)
    assert "Overall exposure level" in done.stdout
    assert done.returncode == 0, done.stdout


def test_a_unit_without_hardening_is_above_the_limit(root: Path) -> None:
    name = "penstock-frontend.service"
    unit = root / "etc/systemd/system" / name
    unit.write_text(unit.read_text().partition("# Privileges")[0])
    assert exposure(root, name, EXPOSURE_LIMITS[name]).returncode != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_the_run_directory_belongs_to_the_service_user_alone(root: Path) -> None:
    (root / "etc").mkdir(exist_ok=True)
    users = run(required_tool("systemd-sysusers"), f"--root={root}", "penstock.conf")
    assert users.returncode == 0, users.stderr
    account = next(
        line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("penstock:")
    )
    uid = int(account.split(":")[2])
    assert 0 < uid < 1000
    files = run(required_tool("systemd-tmpfiles"), f"--root={root}", "--create", "penstock.conf")
    assert files.returncode == 0, files.stderr
    found = (root / "run/penstock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, uid)
    home = (root / "var/lib/penstock").stat()
    assert (stat.S_IMODE(home.st_mode), home.st_uid) == (0o750, uid), (
        "models are fetched before the first start"
    )
