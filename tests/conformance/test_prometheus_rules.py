"""The shipped Prometheus files parse, and the alerts fire on what they are for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ipc.metrics import families as metric_families
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
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_configuration_and_rules_parse() -> None:
    done = promtool("check", "config", SHIPPED / "prometheus.yml")
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout


def test_alerts_fire_on_what_they_are_for(directory: Path) -> None:
    done = promtool("test", "rules", directory / SERIES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_does_not_fire_is_noticed(directory: Path) -> None:
    rules, series = directory / "penstock.rules.yml", directory / SERIES.name
    rules.write_text(rules.read_text().replace("penstock_worker_up == 0", "penstock_worker_up == 2"))
    # Only the series of this alert: evaluating the rules over all of them takes seconds.
    told = yaml.safe_load(series.read_text())
    told["tests"] = told["tests"][:1]
    assert told["tests"][0]["alert_rule_test"][0]["alertname"] == "PenstockWorkerDown"
    series.write_text(yaml.safe_dump(told))
    assert promtool("test", "rules", directory / SERIES.name).returncode != 0


def test_every_alert_is_seen_to_fire_and_to_stay_quiet() -> None:
    groups = yaml.safe_load((SHIPPED / "penstock.rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    cases = [case for test in yaml.safe_load(SERIES.read_text())["tests"] for case in test["alert_rule_test"]]
    for expected in (True, False):
        tested = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is expected}
        assert alerts - tested == set(), "fires" if expected else "is quiet"


def test_no_gauge_has_the_name_of_a_counter_or_of_a_part_of_a_histogram() -> None:
    tables = (metric_families.FRONTEND, metric_families.WORKER, metric_families.SUPERVISOR)
    families = [family for table in tables for family in table]
    reserved = ("_total", "_created", "_count", "_sum", "_bucket", "_info")
    # The second name is that of the chat contract, where it is a gauge too.
    known = {"penstock_build_info", "mistralrs_kv_cache_blocks_total"}
    wrong = {f.name for f in families if f.name.endswith(reserved)} - known
    assert len(families) > 60 and wrong == set()
