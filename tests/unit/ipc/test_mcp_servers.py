"""The file that names MCP servers: defaults, and mistakes told by their field without values of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipc.errors import ConfigError
from ipc.mcp_servers import MAX_NBYTES, Http, McpConfig, Process, WebSocket, prefix_of, read

PROCESS = {"name": "files", "source": {"type": "Process", "command": "run-files"}}

HTTP = {"type": "Http", "url": "http://h/mcp"}


def _read(root: Path, value: Any) -> McpConfig:
    path = root / "mcp.json"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    found = read(str(path))
    assert found is not None
    return found


def test_the_form_of_mistral_rs_is_read_with_its_defaults(tmp_path: Path) -> None:
    servers = [
        PROCESS,
        {"name": "h", "source": {"type": "Http", "url": "https://h/mcp", "headers": {"A": "b"}, "timeout_secs": 5}},
        {"name": "w", "source": {"type": "WebSocket", "url": "wss://w/", "timeout_secs": None}, "enabled": False,
         "tool_prefix": "w", "bearer_token": "t", "id": "1", "resources": ["a://b"]},
    ]  # fmt: skip
    config = _read(tmp_path, {"servers": servers, "auto_register_tools": True})
    assert (config.tool_timeout_secs, config.max_concurrent_calls) == (30, 10)
    first, second, third = config.servers
    assert first.source == Process("run-files") and first.enabled and first.tool_prefix is None
    assert second.source == Http("https://h/mcp", {"A": "b"}, 5)
    assert third.source == WebSocket("wss://w/") and not third.enabled
    assert prefix_of(third) == "w" and prefix_of(first) != prefix_of(first)
    assert prefix_of(first).startswith("mcp_") and len(prefix_of(first)) == 40


def test_no_path_names_no_servers() -> None:
    assert read("") is None


def _with(**fields: Any) -> dict[str, Any]:
    return {"servers": [{**PROCESS, **fields}], "auto_register_tools": True}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "the file is no JSON"),
        (b"\xff", "the file is no JSON"),
        (b" " * (MAX_NBYTES + 1), f"over {MAX_NBYTES} bytes"),
        ([], "Expected object"),
        ({"servers": []}, "missing required field auto_register_tools"),
        ({"servers": [{"name": "a"}], "auto_register_tools": True}, r"source - at \$.servers\[0\]"),
        (_with(source={"type": "Process"}), r"command - at \$.servers\[0\].source"),
        (_with(source={"type": "Http", "url": "file:///etc"}), r"\$.servers\[0\].source.url"),
        (_with(source={"type": "WebSocket", "url": "http://a"}), r"\$.servers\[0\].source.url"),
        (_with(source={"type": "Pipe", "command": "a"}), r"\$.servers\[0\].source.type"),
        (_with(tool_prefix="a b"), r"\$.servers\[0\].tool_prefix"),
        (_with(tool_prefix="mistralrs_x"), r"\$.servers\[0\].tool_prefix"),
        (_with(tool_prefix="mistralrs"), r"\$.servers\[0\].tool_prefix"),
        (_with(tokn="x"), "tokn"),
        (_with(source=HTTP, bearer_token="a\r\nB: secret-t"), r"\$.servers\[0\].bearer_token: control characters"),
        (_with(bearer_token=7), r"\$.servers\[0\].bearer_token"),
        (_with(source={"type": "Process", "command": "a\0"}), r"\$.servers\[0\].source.command"),
        (_with(source={"type": "Process", "command": "a", "work_dir": "b"}), "expected an absolute path"),
        (_with(source={"type": "Process", "command": "a", "env": {"A=": "secret-t"}}), "source.env: names"),
        ({**_with(), "tool_timeout_secs": 0}, r"\$.tool_timeout_secs"),
        ({**_with(), "max_concurrent_calls": 0}, r"\$.max_concurrent_calls"),
        ({**_with(), "servers": [{**PROCESS, "tool_prefix": "a"}] * 2}, r"\$.servers\[1\].tool_prefix: another"),
        ({**_with(), "servers": [PROCESS] * 33}, r"\$.servers"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_by_its_field(tmp_path: Path, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as failed:
        _read(tmp_path, value)
    assert "agent.mcp_config = " in failed.value.message and "secret-t" not in failed.value.message


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="Is a directory"):
        read(str(tmp_path))
