"""`penstock list` and `show` of a server that is asked over HTTP; `show` of a server's own catalog."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ipc.processes.paths import SERVER, RunPaths
from penstock import processes
from penstock.cli import main
from tests.harness.ports import free_port
from tests.harness.server import wait_until

MODELS = {
    "data": [
        {
            "id": "org/chat",
            "tools": "none",
            "precision": "bfloat16",
            "weight_bytes": 269_000_000,
            "cache_bytes": 1_500_000_000,
            "cache_tokens": 65_536,
        },
        {"id": "org/dense"},
    ],
    "models": [
        {"name": "org/chat", "state": "loaded", "outputs": [], "max_sequence_length": 8192},
        {"name": "org/dense", "state": "available", "outputs": ["dense"], "dims": {"dense": 384}},
    ],
}
KEY = "sk-right"


class Handler(BaseHTTPRequestHandler):
    """Answers as a server with a key does."""

    def do_GET(self) -> None:
        """The models, one model, or a refusal."""
        known = {"/v1/models": MODELS, "/v1/models/org/dense": {"name": "org/dense", "state": "available"}}
        known["/livez"] = {}
        status, body = 200, known.get(self.path)
        if self.path != "/livez" and self.headers.get("Authorization") != f"Bearer {KEY}":
            status, body = 401, {"error": {"message": "no key"}}
        elif body is None:
            status, body = 404, {"error": {"message": "unknown model"}}
        text = b"words" if self.path.startswith("/odd") else json.dumps(body).encode()
        self.send_response(200 if self.path.startswith("/odd") else status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with a key, which the environment has."""
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PENSTOCK_KEY", KEY)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_models_of_a_server_are_listed_by_url_and_by_port(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].split() == [
        *("org/chat", "chat", "-", "8192", "loaded"),
        *("bf16", "269", "MB", "1.5", "GB"),
    ]
    assert printed.out.splitlines()[2].split() == [
        *("org/dense", "dense", "384", "-", "available", "-", "-", "-"),
    ]
    assert "2 models of the server" in printed.err
    for words in (["DENSE"], ["--output", "dense"]):
        assert main(["models", "list", *words, "--port", url.rpartition(":")[2], "--json"]) == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["org/dense"]


def test_what_a_server_cannot_answer_is_told_in_a_sentence(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*line: str) -> str:
        assert main([*line]) in (1, 3)
        [told] = capsys.readouterr().err.splitlines()
        return told

    assert "leave out --family" in refusal("list", "--url", url, "--family", "dense")
    assert "is no address of a server" in refusal("list", "--url", "nonsense")
    assert "cannot stand beside" in refusal("list", "--url", url, "--port", "80")
    assert "no list of models" in refusal("list", "--url", f"{url}/odd")
    closed = free_port()
    assert f"no answer from http://127.0.0.1:{closed}/v1/models" in refusal("list", "--port", str(closed))
    monkeypatch.setenv("PENSTOCK_KEY", "wrong")
    told = refusal("list", "--url", url)
    assert "401: no key" in told and "PENSTOCK_KEY" in told


def test_a_model_of_a_server_elsewhere_is_shown_in_the_words_of_that_server(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.target._is_here", lambda host: False)
    assert main(["show", "org/dense", "--url", url]) == 0
    assert "state: available" in capsys.readouterr().out
    assert main(["show", "org/none", "--url", url]) == 1
    assert "404: unknown model" in capsys.readouterr().err


def test_a_server_whose_processes_are_not_to_be_seen_is_asked_over_http(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_RUN__DIR", str(tmp_path / "none" / "run"))
    assert main(["show", "org/dense", "--url", url]) == 0
    assert "state: available" in capsys.readouterr().out
    assert main(["show", "BAAI/bge-m3", "--json", "--url", url, "--catalog", "config/models"]) == 0
    assert json.loads(capsys.readouterr().out)["source"]["kind"] == "hub"
    assert main(["ps", "--url", url]) == 4
    told = f"a server answers at {url}, whose processes are not to be seen: penstock list --url {url}"
    assert capsys.readouterr().err.splitlines()[1].strip() == told
    assert main(["ps", "--url", url, "--run-dir", str(tmp_path)]) == 4
    assert main(["ps", "--port", str(free_port())]) == 4
    assert told not in capsys.readouterr().err


def test_a_model_is_shown_as_the_catalog_of_the_running_server_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (own / "model.safetensors").write_bytes(b"")
    text = "id: BAAI/bge-m3\nadapter: dense\nreplaces: true\nsource: {kind: directory, path: .}\n"
    (own / "entry.yaml").write_text(text)
    monkeypatch.setenv("PENSTOCK_RUN__DIR", str(tmp_path / "run"))
    paths = RunPaths(tmp_path / "run", "i", tmp_path)
    paths.root.mkdir(mode=0o700)
    assert processes.catalog_dirs(paths) == ()
    program = (
        "import sys; from pathlib import Path; from ipc.processes.liveness import SlotLock\n"
        "lock = SlotLock(Path(sys.argv[1])); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(paths.lock(SERVER))],
        cwd=tmp_path,
        env=os.environ | {"PENSTOCK_CATALOG__DIRS": "own"},
        stdin=subprocess.PIPE,
    ) as server:
        wait_until(lambda: processes.catalog_dirs(paths) != (), what="the lock of the server")
        assert processes.catalog_dirs(paths) == (str(own),)
        assert main(["show", "BAAI/bge-m3", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["source"] == {"kind": "directory", "path": str(own)}
        assert main(["show", "BAAI/bge-m3", "--json", "--catalog", "config/models"]) == 0
        assert json.loads(capsys.readouterr().out)["source"]["kind"] == "hub"
        assert server.stdin is not None
        server.stdin.close()
