"""Targets of make that install say within seconds that there is no package index, and what to do."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ports import free_port
from tests.harness.server import ROOT
from tools import package_index


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["run", "run-chat", "test", "check", "bench", "dist"])
def test_without_a_network_a_target_ends_with_one_sentence_and_makes_nothing(
    target: str, tmp_path: Path
) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    url = f"http://127.0.0.1:{free_port()}/simple"
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["make", "--no-print-directory", target, f"VENV={venv}", f"PYTHON={sys.executable}", "TORCH_INDEX="],
        cwd=ROOT, env={**os.environ, "PIP_INDEX_URL": url}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and not venv.exists()
    assert told == [
        f"penstock: the package index {url} cannot be reached (Connection refused): "
        "docs/install.md#without-internet says how packages come from a directory"
    ]
    assert "\n## Without internet\n" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "target", ["run", "run-chat", "test", "check", "docs", "bench", "test-fuzz", "test-real"]
)
def test_the_tree_with_its_extras_is_what_pip_installs_editable(target: str, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    commands = [
        shlex.split(line) for line in done.stdout.replace("\\\n", " ").splitlines() if "--editable" in line
    ]
    assert commands
    for words in commands:
        assert words[words.index("--editable") + 1].startswith(".["), words


def test_a_host_that_accepts_and_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/simple"
        assert package_index.failure(url, patience_s=0.2) == "no answer within 0.2 s"


def test_a_name_that_no_host_has_is_told() -> None:
    assert package_index.failure("http://index.invalid/simple") != ""


def test_an_answer_that_is_an_error_is_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/simple"
        script = (
            "import sys; from tools import package_index; sys.exit(package_index.failure(sys.argv[1]) != '')"
        )
        asking = subprocess.Popen([sys.executable, "-c", script, url], cwd=ROOT)
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        assert asking.wait(60) == 0


def test_only_indexes_over_http_are_asked() -> None:
    further = ("https://download.example/cpu",)
    assert package_index.indexes({}, further) == ["https://pypi.org/simple", *further]
    assert package_index.indexes({"index-url": "file:///srv/simple"}, further) == [*further]
    assert package_index.indexes({"index-url": "https://mirror.example/simple"}, ()) == [
        "https://mirror.example/simple"
    ]
    assert package_index.indexes({"no-index": "1"}, further) == []


def test_the_environment_goes_before_the_files_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mine.example/simple")
    assert package_index.configured()["index-url"] == "https://mine.example/simple"
