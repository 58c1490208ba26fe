"""Runs with tools in a frame of the status stream, with the tool host and the state directory.

1. `run_fields` has the runs that a viewer sees. Arguments of calls may hold secrets of users, and the id of a decision
   lets its reader decide, so both are for viewers that may operate the server.
2. `agent_fields` is the same for all viewers. The tool host is seen by the frontend that builds the frame.
3. `lacks` says in words what tools lack while requests without tools are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frontend.records.recent import LiveRun
from frontend.services import Services
from frontend.status.health import Problem
from ipc.metrics.files import Totals

SHOWN_RUNS = 24
_IN_FLIGHT, _SANDBOXES = "penstock_agent_runs_in_flight", "penstock_tool_sandboxes"


def run_fields(runs: Sequence[LiveRun], owner: str | None, *, operates: bool) -> list[dict[str, Any]]:
    """The runs of a key, None: of all callers, in the order of their beginning, at most `SHOWN_RUNS`.

    `operates`: whether the viewer sees arguments and ids of decisions. Runs that wait for decisions come first into the
    list, so that no other run displaces them.
    """
    seen = [run for run in runs if owner is None or run.owner == owner]
    chosen = sorted(seen, key=lambda run: run.doing != "approval")[:SHOWN_RUNS]
    return [_run(run, operates) for run in sorted(chosen, key=lambda run: run.began)]


def _run(run: LiveRun, operates: bool) -> dict[str, Any]:
    return {
        "request_id": run.request_id,
        "model": run.model,
        "owner": run.owner,
        "began": round(run.began, 3),
        "round": run.round,
        "files": run.files,
        "doing": run.doing,
        "since": round(run.since, 3),
        "tool": run.tool,
        "arguments": run.arguments if operates else None,
        "arguments_chars": run.arguments_chars if operates else None,
        "approval_id": run.approval_id if operates else "",
    }


def agent_fields(services: Services, totals: Totals) -> dict[str, Any]:
    """Runs under way by what they do, the tool host (None where no tool needs one), the state directory."""
    counts = {
        dict(labels).get("state", ""): int(n) for labels, n in totals.others.get(_IN_FLIGHT, {}).items()
    }
    return {
        "in_flight": {doing: counts.get(doing, 0) for doing in ("model", "tool", "approval")},
        "host": _host(services, totals),
        "state": _state(services),
    }


def _host(services: Services, totals: Totals) -> dict[str, Any] | None:
    if not services.settings.agent.has_tools:
        return None
    host = services.agent.host
    ready, remotes = host.ready, host.remotes
    return {
        "alive": ready is not None,
        "since": round(host.since, 3),
        "layers": {} if ready is None else ready.layers,
        "mcp": None if remotes is None else {"connected": remotes.connected, "tools": len(remotes.tools)},
        "sandboxes": 0 if ready is None else int(sum(totals.others.get(_SANDBOXES, {}).values())),
    }


def _state(services: Services) -> dict[str, Any]:
    files, nbytes = services.state.kept
    return {
        "files": files,
        "bytes": nbytes,
        "max_bytes": services.settings.state.max_files_bytes,
        "full": services.state.is_full,
    }


def lacks(services: Services) -> list[Problem]:
    """What tools and files lack now: a tool host that does not answer, a state directory without room."""
    problems = []
    if services.settings.agent.has_tools and services.agent.host.ready is None:
        note = "requests with its tools are refused"
        problems.append(Problem("tools", "The tool host does not answer", services.agent.host.since, note))
    if services.state.is_full:
        text = "The state directory has no room for another file"
        problems.append(Problem("state", text, note="uploads are refused"))
    return problems
