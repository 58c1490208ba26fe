"""A real Prometheus with the shipped configuration scrapes a running server and evaluates the shipped rules on it."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.required_tool import required_tool
from tests.harness.ports import free_port
from tests.harness.server import PATIENCE_S, Server, serving, wait_until
from tools.source_tree import ROOT

SHIPPED = ROOT / "deploy" / "prometheus"


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **query: str) -> Any:
        """`data` of an API answer; None while the server does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/api/v1/{path}?{urllib.parse.urlencode(query)}")
            response = connection.getresponse()
            body = response.read()
        except OSError:
            return None
        finally:
            connection.close()
        return json.loads(body)["data"] if response.status == 200 else None

    def query(self, expression: str) -> list[Any]:
        """Result of an instant query."""
        found = self.get("query", query=expression)
        return list(found["result"]) if found else []

    def value(self, expression: str) -> float:
        """Sum over the samples of an instant query; -1 when there are none."""
        found = self.query(expression)
        return sum(float(sample["value"][1]) for sample in found) if found else -1.0


def write_configuration(directory: Path, server: Server) -> Path:
    """A copy of the shipped files that scrapes this server every second; nothing else is changed."""
    shutil.copytree(SHIPPED, directory, dirs_exist_ok=True)
    file = directory / "prometheus.yml"
    shipped = file.read_text()
    changed = shipped.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}").replace(": 15s", ": 1s")
    changed = changed.replace("scrape_timeout: 10s", "scrape_timeout: 1s")
    assert changed.count(str(server.port)) == 1
    assert changed.count(": 1s") == 3
    file.write_text(changed)
    return file


@contextmanager
def prometheus(tmp_path: Path, server: Server) -> Iterator[Prometheus]:
    """Prometheus on a free port, its data under `tmp_path`."""
    port = free_port()
    command = [
        required_tool("prometheus"),
        f"--config.file={write_configuration(tmp_path / 'prometheus', server)}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    log = tmp_path / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
    try:
        found = Prometheus(port)
        wait_until(lambda: process.poll() is not None or found.get("status/buildinfo"), what="Prometheus")
        assert process.poll() is None, log.read_text()
        yield found
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.long
def test_the_shipped_configuration_scrapes_a_server_evaluates_its_rules_and_sees_it_go(
    tmp_path: Path,
) -> None:
    required_tool("prometheus")
    with serving(tmp_path, supervised=False) as server, prometheus(tmp_path, server) as found:
        for number in range(5):
            assert server.encode("fake/echo", [f"text {number}"]).status == 200
        wait_until(
            lambda: found.value('penstock_requests_total{model="fake/echo",code="200"}') == 5, what="data"
        )
        assert found.value('up{job="penstock"}') == 1
        target = found.get("targets")["activeTargets"][0]
        assert (target["health"], target["lastError"]) == ("up", "")
        assert found.value("penstock_ready") == 1
        assert found.value("penstock_worker_up") == 1
        answered = "penstock_request_duration_seconds_bucket{phase='total',outcome='ok'}"
        quantile = f"histogram_quantile(0.5, sum by (le) ({answered}))"
        assert 0 < found.value(quantile) < 10
        wait_until(lambda: rules_evaluated(found), what="the evaluation of all rules")
        unwell = {rule["name"]: rule["lastError"] for rule in rules(found) if rule["health"] != "ok"}
        assert not unwell
        assert {rule["type"] for rule in rules(found)} == {"recording", "alerting"}
        wait_until(lambda: found.value("instance:penstock_in_flight:sum") >= 0, what="a recorded series")
        assert "PenstockDown" not in alerts(found)
        server.stop()
        wait_until(lambda: found.value('up{job="penstock"}') == 0, what="a failed scrape")
        wait_until(lambda: "PenstockDown" in alerts(found), what="a pending alert")


def alerts(found: Prometheus) -> set[str]:
    """Names of the alerts that are pending or firing."""
    return {alert["labels"]["alertname"] for alert in found.get("alerts")["alerts"]}


def rules(found: Prometheus) -> list[Any]:
    """All rules of all groups."""
    return [rule for group in found.get("rules")["groups"] for rule in group["rules"]]


def rules_evaluated(found: Prometheus) -> bool:
    """Whether every rule was evaluated at least once."""
    known = rules(found)
    return bool(known) and all(rule["health"] != "unknown" for rule in known)
