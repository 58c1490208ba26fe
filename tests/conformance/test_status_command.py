"""`penstock status` of a running server: what the command tells, also while all frontends are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from penstock.cli import main
from tests.harness.server import ROOT, Server, stopped


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


def test_every_process_and_model_is_told(trtis_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--run-dir", str(trtis_server.run_dir), "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["runs"] and view["sound"]
    assert view["arbiter"]["pid"] == trtis_server.owner_pid()
    assert view["supervisor"]["pid"] == trtis_server.supervisor_pid()
    assert {each["pid"] for each in view["frontends"]} == set(trtis_server.frontend_pids())
    [worker] = view["workers"]
    assert worker["process"]["pid"] == trtis_server.worker_pid() and worker["state"] == "serving"
    assert worker["device"] == "cpu" and worker["bound"] > 0 and worker["arena_total"] > 0
    loaded = {each["name"] for each in worker["models"] if each["state"] == "loaded"}
    assert "fake/echo" in loaded


def test_stopped_frontends_do_not_hinder_the_command(
    trtis_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    frontends = trtis_server.frontend_pids()
    with stopped(*frontends):
        code = main(["status", "--run-dir", str(trtis_server.run_dir)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    states = {tuple(words[:2]): words[2] for words in lines if words[:1] in (["frontend"], ["worker"])}
    assert code == 1
    assert states == {("frontend", "0"): "stopped", ("frontend", "1"): "stopped", ("worker", "0"): "serving"}
    assert any(words[:2] == ["fake/echo", "loaded"] for words in lines)


def test_a_watch_looks_again_until_an_interrupt(trtis_server: Server) -> None:
    command = (sys.executable, "-m", "penstock", "status", "--run-dir", str(trtis_server.run_dir))
    with subprocess.Popen(
        [*command, "--json", "--watch", "0.1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # A test that runs in the background inherits an ignored interrupt.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        views = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert all(view["sound"] for view in views)
    assert views[0]["arbiter"]["up_s"] < views[1]["arbiter"]["up_s"]
