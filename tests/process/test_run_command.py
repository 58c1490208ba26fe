"""`penstock run`: a model in a file is served beside other servers, and nothing is left of its server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from ipc.processes import starting
from penstock.cli import main
from penstock.own_server import descendants
from tests.conformance.minilm import DIRECTORY
from tests.harness.ports import free_port
from tests.harness.server import alive, wait_until
from tests.tiny import gguf_models


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short name, below which a server has its run directory."""
    return tmp_path_factory.mktemp("run")


def processes_of(place: Path) -> list[int]:
    """Processes whose settings name a directory."""
    pids: list[int] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.fsencode(place) in Path(f"/proc/{pid}/environ").read_bytes():
                pids.append(pid)
    return pids


def start(place: Path, *words: str, settings: str = "") -> subprocess.Popen[str]:
    """`penstock run` with a tiny model; all files of its server are below `place`."""
    gguf_models.write(place / "tiny.gguf", "qwen3")
    for name in ("shm", "tmp"):
        (place / name).mkdir()
    file = place / "settings.yaml"
    file.write_text(
        f"server: {{bind: '127.0.0.1:{free_port()}', frontends: 1{settings}}}\n"
        f"run: {{dir: {place / 'run'}, shm_dir: {place / 'shm'}}}\nworker: {{count: 1}}\n"
    )
    line = ["run", "tiny.gguf", *words, "--max-tokens", "3", "--device", "cpu", "--config", str(file)]
    return subprocess.Popen(
        starting.command("penstock", *line),
        cwd=place,
        env=starting.environment() | {"TMPDIR": str(place / "tmp"), "XDG_STATE_HOME": str(place / "state")},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def assert_nothing_is_left(place: Path) -> None:
    """No process, no arena, no file, but the directory that torch makes for temporary files."""
    wait_until(lambda: not processes_of(place / "tmp"), what="the end of the server")
    assert {each.name for each in place.iterdir()} == {"tiny.gguf", "settings.yaml", "shm", "tmp"}
    assert not [*(place / "shm").iterdir(), *(place / "tmp").glob("penstock-*")]


def test_a_model_in_a_file_is_served_beside_another_server_asked_and_stopped(place: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as metrics,
        socket.create_server(("127.0.0.1", 0)) as health,
        socket.create_server(("127.0.0.1", 0)) as grpc,
        pytest.MonkeyPatch.context() as patch,
    ):
        taken = [f"127.0.0.1:{each.getsockname()[1]}" for each in (metrics, health, grpc)]
        patch.setenv("PENSTOCK_GRPC__BIND", taken[2])
        addresses = f", metrics_bind: '{taken[0]}', health_bind: '{taken[1]}', metrics_on_bind: false"
        with start(place, settings=addresses) as run:
            answer, errors = run.communicate("hi\n/model\n/bye\nnever\n", timeout=120)
    assert run.returncode == 0, errors
    assert (
        answer.strip() and errors.count("the model is tiny; models of generated text: default, tiny\n") == 1
    )
    assert_nothing_is_left(place)


def test_wrong_settings_of_the_command_line_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "x", "--set", "worker.nothing=1"]) == 3
    assert "worker.nothing" in capsys.readouterr().err
    assert main(["run", "x", "--set", "nothing"]) == 3
    assert "expected SECTION.FIELD=VALUE" in capsys.readouterr().err


@pytest.mark.long
def test_settings_of_the_command_line_count_for_the_server(place: Path) -> None:
    with start(place, "hi", "--set", "limits.max_body_bytes=8") as run:
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 1 and "request body too large" in errors
    assert_nothing_is_left(place)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.long), signal.SIGKILL])
def test_a_run_that_a_signal_ends_leaves_no_server(number: signal.Signals, place: Path) -> None:
    below: list[int] = []
    try:
        with start(place) as run:
            # The arbiter, the supervisor, a frontend and a worker.
            # One that has just been started may not have its settings yet, or end at once.
            wait_until(
                lambda: (
                    len(below := descendants(run.pid)) >= 4 and {*below} <= {*processes_of(place / "tmp")}
                ),
                what="processes of the server",
            )
            below = descendants(run.pid)
            run.send_signal(number)
            run.communicate(timeout=60)
        wait_until(lambda: not any(map(alive, below)), what="the end of the server")
    finally:
        for pid in below:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
    if number == signal.SIGHUP:
        assert run.returncode == 128 + number
        assert_nothing_is_left(place)


def test_a_model_without_text_and_one_that_is_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(DIRECTORY), "--port", "9"]) == 3
    assert "generates no text, it gives dense: use `penstock serve" in capsys.readouterr().err
    assert main(["run", "nothing", "--port", "9"]) == 1
    assert "is no model of the catalog" in capsys.readouterr().err
