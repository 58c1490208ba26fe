"""The tool runner of the SDK of Anthropic from npm, over a socket to an engine that tells recorded events."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.generation_server import SCRIPT, RecordedServer, calling

pytestmark = pytest.mark.real

CLIENT = Path(__file__).parent / "npm"
CALLS = [("call-1", "weather", "Oslo"), ("call-2", "weather", "Rome"), ("call-3", "forecast", "Bonn")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the script and the SDK."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    place = tmp_path_factory.mktemp("npm")
    shutil.copytree(CLIENT, place, dirs_exist_ok=True)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=place, check=True, timeout=300
    )
    return place


@pytest.mark.parametrize("mode", ["whole", "streamed"])
def test_the_runner_of_tools_makes_three_rounds(client: Path, tmp_path: Path, mode: str) -> None:
    server = RecordedServer(tmp_path)
    server.script(*(calling(*call) for call in CALLS), SCRIPT)
    with server.listening() as url:
        run = subprocess.run(
            ["node", "tool_runner.js", url, mode], cwd=client, capture_output=True, text=True, timeout=60
        )
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    assert told["statuses"] == [400, 200, 200, 200, 200], "the first request asks for a thread"
    assert told["asked"] == ["Oslo", "Rome", "Bonn"]
    assert told["message"]["content"] == [{"type": "text", "text": "Hello you"}]
    talk = server.engine.calls[3].messages or []
    results = [message["content"] for message in talk if message["role"] == "tool"]
    assert results == ["cold in Oslo", "cold in Rome", "warm in Bonn"]
