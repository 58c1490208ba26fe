"""Faults around runs with tools: one end each, no tool runs twice, no row, content or work directory stays."""

from __future__ import annotations

import asyncio
import http.client
import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from frontend.state.approvals import ApprovalStore
from frontend.state.places import OnDisk
from ipc.processes.paths import RunPaths
from ipc.settings import State
from tests.conformance.required_tool import required_tool
from tests.fault import rounds
from tests.harness.agent_runs import Run, agent_server, approvals, decide, output
from tests.harness.server import Server, wait_until

GONE = (404, {"status": "not_found"})
DONE = b"data: [DONE]\n\n"
UNTIL_GO = "touch begun; while ! test -e go; do sleep 0.05; done; echo end"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    required_tool("bwrap")
    with agent_server(tmp_path_factory.mktemp("runs"), graceful_timeout_s=10) as running:
        yield running
        assert approvals(running) == []
        assert contents(running) == set()


@pytest.fixture
def session(server: Server) -> Iterator[str]:
    """The id of a session, whose sandbox ends behind the test; no frontend is missing or has work then."""
    id_ = uuid4().hex
    yield id_
    wait_until(lambda: len(server.frontend_pids()) == 2, what="both frontends")
    wait_until(lambda: server.metric("penstock_agent_runs_in_flight") == 0, what="the end of all runs")
    wait_until(lambda: server.request("DELETE", f"/v1/sessions/{id_}").status == 200, what="the deletion")
    for file in server.get("/v1/files").json()["data"]:
        server.request("DELETE", f"/v1/files/{file['id']}")


def work_directories(server: Server) -> list[Path]:
    """Those of the sandboxes that are alive."""
    return list(RunPaths(server.run_dir, "").tools_work().iterdir())


def contents(server: Server) -> set[str]:
    """Stored contents of files."""
    place = server.run_dir / "state" / "files"
    return {path.name for path in place.iterdir()} if place.exists() else set()


def told(server: Server, id_: str) -> tuple[int, object]:
    """The answer to an approval."""
    answer = decide(server, id_, "approve")
    return answer.status, answer.json()


def ends(rest: bytes) -> tuple[int, int, int]:
    """How often a stream has ended by a reason, by an error, and by its mark."""
    return rest.count(b'"finish_reason":"'), rest.count(b'{"error":'), rest.count(b"[DONE]")


def test_a_frontend_that_is_killed_while_a_call_waits_runs_nothing_twice(
    server: Server, session: str
) -> None:
    for _ in range(rounds(short=1, long=20)):
        output(server, "rm -f marks", session)
        with Run(server, session, ["echo ran >> marks", "echo never >> marks"]) as run:
            assert told(server, run.asked()) == (200, {"status": "resolved"})
            run.result()
            id_, pid = run.asked(), run.pid
            os.kill(pid, signal.SIGKILL)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                run.rest()
        wait_until(
            lambda pid=pid: pid not in (now := server.frontend_pids()) and len(now) == 2,
            what="the next frontend",
        )
        assert told(server, id_) == GONE
        assert output(server, "cat marks", session) == "ran\n"
        asyncio.run(ApprovalStore(OnDisk(server.run_dir / "state"), State()).sweep())
        assert approvals(server) == []


def test_a_reload_lets_tools_and_answered_calls_end_and_ends_a_wait_with_one_error(
    server: Server, session: str
) -> None:
    """A frontend that drains and is told once more ends at once, whatever its time."""
    waiting, answered = uuid4().hex, uuid4().hex
    with (
        Run(server, session, [UNTIL_GO], permission="auto") as works,
        Run(server, waiting, ["echo one >> marks"]) as waits,
        Run(server, answered, ["echo two"]) as ends_in_order,
    ):
        id_, decided = waits.asked(), ends_in_order.asked()
        [begun] = wait_until(lambda: [w for w in work_directories(server) if (w / "begun").exists()])
        before, pid = set(server.frontend_pids()), waits.pid
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: set(server.frontend_pids()) - before, what="the new frontends")
        (begun / "go").touch()
        assert works.result()["stdout"] == "end\n"
        assert ends(works.rest()) == (1, 0, 1)
        assert told(server, decided) == (200, {"status": "resolved"})
        assert ends_in_order.result()["stdout"] == "two\n"
        assert ends(ends_in_order.rest()) == (1, 0, 1)
        os.kill(pid, signal.SIGTERM)
        message = waits.until("error")["error"]["message"]
        assert f"continue session {waiting}" in message
        assert ends(waits.rest()) == (0, 0, 1)
    wait_until(lambda: before.isdisjoint(server.frontend_pids()), what="the end of the old frontends")
    assert approvals(server) == [] and told(server, id_) == GONE
    assert output(server, "cat marks", waiting) == ""
    for each in (waiting, answered):
        assert server.request("DELETE", f"/v1/sessions/{each}").status == 200


def test_a_worker_that_is_killed_between_rounds_ends_the_run_once_and_the_tool_ran_once(
    server: Server, session: str
) -> None:
    for _ in range(rounds(short=1, long=20)):
        output(server, "rm -f marks", session)
        with Run(server, session, ["echo ran >> marks"]) as run:
            id_ = run.asked()
            worker = wait_until(server.worker_pid, what="the worker")
            os.kill(worker, signal.SIGKILL)
            assert told(server, id_) == (200, {"status": "resolved"})
            assert run.result()["exit_code"] == 0
            rest = run.rest()
            reasons, errors, marks = ends(rest)
            assert (reasons + errors, marks) == (1, 1), rest
        wait_until(lambda worker=worker: server.worker_pid() not in (None, worker), what="the next worker")
        assert output(server, "cat marks", session) == "ran\n"


def test_a_store_that_is_locked_ends_the_run_with_one_error_and_the_tool_ran_once(
    server: Server, session: str
) -> None:
    output(server, "rm -f marks", session)
    before = server.get(f"/v1/sessions/{session}").json()
    with closing(sqlite3.connect(server.run_dir / "state" / "sessions-2.db", isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        with Run(server, session, ["echo ran >> marks"], permission="auto") as run:
            assert run.result()["exit_code"] == 0
            assert "stored objects cannot be reached" in run.until("error")["error"]["message"]
            assert ends(run.rest()) == (0, 0, 1)
        held.execute("ROLLBACK")
    assert server.get(f"/v1/sessions/{session}").json() == before
    assert output(server, "cat marks", session) == "ran\n"


@contextmanager
def full_disk(server: Server) -> Iterator[None]:
    """No file of a frontend may grow meanwhile, which SQLite calls an error of the disk."""
    pids = server.frontend_pids()
    was = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in was.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        for pid, limits in was.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_takes_no_bytes_ends_the_run_with_one_error_and_leaves_no_file(
    server: Server, session: str
) -> None:
    output(server, "rm -f marks", session)
    kept = contents(server)
    with full_disk(server), Run(server, session, ["echo ran >> marks"], permission="auto") as run:
        assert "stored objects cannot be reached" in run.until("error")["error"]["message"]
        assert ends(run.rest()) == (0, 0, 1)
    assert contents(server) == kept
    assert output(server, "cat marks", session) == "ran\n"


def test_a_session_that_is_deleted_leaves_no_work_directory_and_no_process(
    server: Server, session: str
) -> None:
    wait_until(lambda: not work_directories(server), what="the end of the sandboxes before")
    host = psutil.Process(server.tool_host_pid())
    output(server, "echo 1 > file; (sleep 4321 &)", session)
    assert len(work_directories(server)) == 1
    assert server.request("DELETE", f"/v1/sessions/{session}").status == 200
    wait_until(lambda: not work_directories(server), what="the end of the sandbox")
    wait_until(lambda: not host.children(recursive=True), what="the end of its processes")
