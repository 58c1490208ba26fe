"""Every query of the shipped dashboard, evaluated by a real Prometheus that scrapes a server under some load."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ipc.metrics import cluster as cluster_families
from ipc.metrics import families as metric_families
from tests.conformance.required_tool import required_tool
from tests.conformance.test_prometheus_live import Prometheus, prometheus
from tests.harness.server import Server, serving, wait_until
from tools.source_tree import ROOT

GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "penstock.json").read_text(encoding="utf-8"))
MODELS = ("fake/echo", "fake/slow", "fake/large", "fake/small")
SUBSTITUTES = {"$__rate_interval": "10s", "$instance": ".*", "$model": ".*", "${datasource}": "prometheus"}
ONLY_AFTER_FAULTS = {
    "Restarts of workers": "there is a series only once a worker was started again",
    "Quarantined": "the supervisor's families begin with the first fault",
    "Requests by key": "the server has no keys",
    "Time to first token": "no model generates text",
    "Time between tokens": "no model generates text",
    "mistralrs_time_to_first_token": "no model generates text",
    "mistralrs_inter_token_latency": "no model generates text",
    **dict.fromkeys(
        (
            *(
                "Runs under way",
                "Ends of runs",
                "Calls in runs",
                "Time of calls in runs",
                "Waits for decisions",
            ),
            *("Tool host", "Calls of the tool host", "Time of calls in the tool host", "MCP servers"),
        ),
        "no tool of the server is on",
    ),
    **dict.fromkeys(
        (
            *("Requests of gateways", "Time of requests at gateways", "Boxes"),
            *("Items by lane", "Items sent again", "Signs of life", "Pools", "Demand"),
            *("Configurations", "Queue of gateways", "Failures of the queue", "Large bytes between hosts"),
            *("Queues of boxes", "Memory of boxes", "Items at bridges"),
            *("Times at bridges", "Models at bridges"),
        ),
        "the server is no gateway",
    ),
}
"""Panels that may be empty on a healthy server without keys, and why."""
ROWS = [
    "Traffic",
    "Latency by phase",
    "Batching",
    "Queue",
    "Devices",
    "Models",
    "Memory and leases",
    "Faults and restarts",
    "SIE names",
    "Tensor requests",
    "Generated text",
    "mistral.rs names",
    "Runs with tools",
    "Cluster",
]
TABLES = (
    *metric_families.FRONTEND,
    *metric_families.WORKER,
    *metric_families.SUPERVISOR,
    *metric_families.RUNS,
    *metric_families.TOOLS,
    *cluster_families.GATEWAY,
    *cluster_families.POOLS,
    *cluster_families.BRIDGE,
)


def panels() -> list[dict[str, Any]]:
    """Panels with queries."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """(title, expression) of every query, the annotations' included."""
    found = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    return found + [(entry["name"], entry["expr"]) for entry in DASHBOARD["annotations"]["list"]]


def substituted(expression: str) -> str:
    """The expression with a value for every variable."""
    for name, value in SUBSTITUTES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def names_in(expression: str) -> set[str]:
    """Metric names of an expression."""
    return set(re.findall(r"\b((?:penstock|sie|mistralrs|http)_[a-z0-9_]+)", expression))


def exposed() -> set[str]:
    """Every sample name that the tables of families can give."""
    names = set()
    for family in TABLES:
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {family.name + suffix for suffix in suffixes[family.kind]}
    return names


def families() -> set[str]:
    """Family names without suffixes."""
    return {family.name for family in TABLES}


def test_every_metric_of_the_dashboard_is_one_of_ours() -> None:
    for title, expression in queries():
        assert names_in(expression), title
        assert names_in(expression) <= exposed(), title
    for variable in DASHBOARD["templating"]["list"][1:]:
        assert names_in(variable["definition"]) <= exposed()


def test_every_family_is_on_the_dashboard() -> None:
    shown = {name for _, expression in queries() for name in names_in(expression)}
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}
    assert families() - stems - shown == {"penstock_build_info"}


def test_the_rows_are_there_and_no_panel_overlaps_another() -> None:
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_provisioning_samples_are_what_grafana_reads() -> None:
    dashboards = yaml.safe_load((GRAFANA / "provisioning/dashboards/penstock.yaml").read_text())
    assert dashboards["apiVersion"] == 1 and dashboards["providers"][0]["type"] == "file"
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())
    assert sources["datasources"][0]["type"] == "prometheus"


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Requests of several kinds, one after the other, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            server.encode("fake/echo", ["a", "b" * 4000])
            server.encode("fake/slow", ["c"])
            server.encode("fake/large", ["d"])
            server.encode("none", ["e"])
            server.post("/v1/embeddings", {"model": "fake/echo", "input": "f"})
            server.encode("fake/small", ["x" * 400])
            ended.wait(0.1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


def numbers(samples: list[Any]) -> list[float]:
    """Values of an instant vector that are numbers."""
    return [value for sample in samples if not math.isnan(value := float(sample["value"][1]))]


def problem(found: Prometheus, expression: str) -> str:
    """Why an expression has no value, or an empty string."""
    data = found.get("query", query=expression)
    if data is None:
        return "error"
    return "" if numbers(data["result"]) else "empty"


@pytest.mark.timeout(180)
def test_every_query_is_answered_and_has_values_under_load(tmp_path: Path) -> None:
    required_tool("prometheus")
    settings = {"batch.max_items": 4}
    with serving(tmp_path, MODELS, settings) as server, prometheus(tmp_path, server) as found, load(server):
        open_ones = dict.fromkeys(queries(), "not asked")

        def settled() -> bool:
            for title, expression in list(open_ones):
                why = problem(found, substituted(expression))
                assert why != "error", (title, expression)
                if not why:
                    del open_ones[title, expression]
            return {title for title, _ in open_ones} <= set(ONLY_AFTER_FAULTS)

        try:
            wait_until(settled, what="a value for every query")
        except AssertionError as error:
            raise AssertionError(f"without values: {open_ones}") from error
    assert {title for title, _ in open_ones} <= set(ONLY_AFTER_FAULTS)
