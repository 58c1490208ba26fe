"""What a frame and probes tell of runs, the tool host and the state directory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from falcon import testing
from falcon.asgi import App

from frontend.access.gate import Gate
from frontend.engine.interface import LOADING
from frontend.protocols.server_routes import ReadinessResource
from frontend.services import Services
from frontend.state.state import State
from frontend.status.agents import agent_fields, lacks
from frontend.status.health import Problem, health_fields
from ipc.catalog.entries import Catalog
from ipc.metrics.files import Totals
from ipc.settings import load
from ipc.wire.tools import Ready, Remotes, RemoteTool

HOST = "The tool host does not answer"
ROOM = "The state directory has no room for another file"


@pytest.fixture
def services(tmp_path: Path) -> Services:
    """A frontend with tools, whose host answers."""
    settings = load(None, {"run.dir": str(tmp_path), "agent.shell": "true"})
    made = Services(settings, Catalog([]), Gate())
    made.state = State(settings)
    made.engine = SimpleNamespace(ready=lambda: (True, ""))  # type: ignore[assignment]
    ready = Ready({"namespaces": "active"}, python=True, shell=True)
    made.agent = SimpleNamespace(host=SimpleNamespace(ready=ready, since=7.0, remotes=None))
    return made


def probe(services: Services) -> Any:
    app = App()
    app.add_route("/readyz", ReadinessResource(services))
    return testing.TestClient(app).simulate_get("/readyz")


def test_a_server_that_lacks_nothing_says_ok(services: Services) -> None:
    assert lacks(services) == [] and probe(services).text == "ok"


def test_a_missing_tool_host_and_a_full_directory_are_warnings_of_a_ready_server(services: Services) -> None:
    services.agent.host.ready, services.state.is_full = None, True
    assert [(problem.text, problem.since) for problem in lacks(services)] == [(HOST, 7.0), (ROOM, 0.0)]
    answer = probe(services)
    assert answer.status_code == 200
    assert answer.text == (
        f"ok\nwarning: {HOST} (requests with its tools are refused)\nwarning: {ROOM} (uploads are refused)\n"
    )
    assert health_fields(True, "", lacks(services))["state"] == "degraded"


def test_a_server_that_is_not_ready_keeps_its_reason_on_the_second_line(services: Services) -> None:
    services.engine.ready = lambda: (False, LOADING)  # type: ignore[method-assign]
    assert probe(services).text == f"not ready\n{LOADING}\n"
    services.state.is_full = True
    answer = probe(services)
    assert answer.status_code == 503 and answer.text.split("\n")[1:3] == [
        LOADING, f"warning: {ROOM} (uploads are refused)",
    ]  # fmt: skip


def test_what_tools_lack_does_not_change_why_a_server_is_down(services: Services) -> None:
    services.agent.host.ready = None
    failed = Problem("model", "Model a could not be loaded")
    for found, state in (([failed], "down"), ([], "starting")):
        assert health_fields(False, "why", [*found, *lacks(services)])["state"] == state


def test_a_server_without_tools_misses_no_host(services: Services, tmp_path: Path) -> None:
    services.settings = load(None, {"run.dir": str(tmp_path)})
    services.agent.host.ready = None
    assert lacks(services) == [] and agent_fields(services, Totals())["host"] is None


def test_a_frame_tells_runs_in_flight_the_host_and_kept_files(services: Services) -> None:
    services.state.kept = (3, 4096)
    gauges = {
        "penstock_agent_runs_in_flight": {(("state", "tool"),): 2.0, (("state", "approval"),): 1.0},
        "penstock_tool_sandboxes": {(): 4.0},
    }
    fields = agent_fields(services, Totals(others=gauges))
    assert fields["in_flight"] == {"model": 0, "tool": 2, "approval": 1}
    layers = {"namespaces": "active"}
    assert fields["host"] == {"alive": True, "since": 7.0, "layers": layers, "sandboxes": 4, "mcp": None}
    services.agent.host.remotes = Remotes(2, [RemoteTool("m__t", "m", "", {})])
    assert agent_fields(services, Totals())["host"]["mcp"] == {"connected": 2, "tools": 1}
    state = fields["state"]
    assert (state["files"], state["bytes"], state["full"]) == (3, 4096, False)
    services.agent.host.ready = None
    lost = agent_fields(services, Totals(others=gauges))["host"]
    assert (lost["alive"], lost["layers"], lost["sandboxes"]) == (False, {}, 0)
