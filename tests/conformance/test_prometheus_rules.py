"""The shipped Prometheus files parse, and the alerts fire on what they are for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.required_tool import required_tool
from tools.source_tree import ROOT

SHIPPED = ROOT / "deploy" / "prometheus"
SERIES = Path(__file__).with_name("prometheus_rules.yml")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the shipped files beside the series that test them."""
    shutil.copytree(SHIPPED, tmp_path, dirs_exist_ok=True)
    shutil.copy(SERIES, tmp_path)
    return tmp_path


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end, its output as text."""
    command = [required_tool("promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_configuration_and_rules_parse() -> None:
    done = promtool("check", "config", SHIPPED / "prometheus.yml")
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout


def test_alerts_fire_on_what_they_are_for(directory: Path) -> None:
    done = promtool("test", "rules", directory / SERIES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_does_not_fire_is_noticed(directory: Path) -> None:
    rules = directory / "penstock.rules.yml"
    rules.write_text(rules.read_text().replace("penstock_worker_up == 0", "penstock_worker_up == 2"))
    assert promtool("test", "rules", directory / SERIES.name).returncode != 0
