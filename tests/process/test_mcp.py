"""MCP servers of the operator in real sandboxes, from a tool host and from a whole server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from frontend.agent.host import ToolHost
from ipc.errors import SandboxFailed
from ipc.wire.tools import RemoteCall, RemoteResult
from tests.conformance.required_tool import required_tool
from tests.fakes import mcp_program
from tests.fakes.mcp_servers import PROGRAM
from tests.fakes.tool_host import until
from tests.harness.later import openai
from tests.harness.server import Server, serving, wait_until
from tests.harness.tool_host import HostProcess, client, tool_host
from tests.tiny import chat_models

MODEL = "tiny/chatml"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def config_of(root: Path, **source: Any) -> Path:
    """A configuration of one program, with the prefix `p`, and of a server that is not there."""
    servers = [
        {"name": "program", "tool_prefix": "p", "source": {**PROGRAM, **source}},
        {
            "name": "gone",
            "source": {"type": "Http", "url": "http://127.0.0.1:9/mcp"},
            "bearer_token": "secret-t",
        },
    ]
    path = root / "mcp.json"
    path.write_text(json.dumps({"servers": servers, "auto_register_tools": True}))
    return path


async def _call(host: ToolHost, name: str, **arguments: Any) -> RemoteResult:
    done, _ = await host.run("", RemoteCall(f"p_{name}", orjson.dumps(arguments).decode()), lasting=False)
    assert isinstance(done.result, RemoteResult)
    return done.result


def _program(host: HostProcess) -> psutil.Process:
    """The process of the program, not of its sandbox around."""
    alive = [each for each in host.tree() if each.status() != psutil.STATUS_ZOMBIE]
    return next(each for each in alive if each.cmdline()[1:2] == ["-c"])


def test_a_program_runs_in_a_sandbox_and_a_killed_one_fails_its_call_and_comes_back(tmp_path: Path) -> None:
    off = {"code_execution": "false", "shell": "false"}
    with tool_host(tmp_path, mcp_config=config_of(tmp_path, env={"OWN": "1"}), **off) as process:

        async def body() -> None:
            async with client(process) as host:
                await until(lambda: bool(host.remote_tools))
                assert host.remotes is not None and host.remotes.connected == 1
                variables, directory = orjson.loads((await _call(host, "env")).text)
                assert directory == "/mnt/data" and variables["OWN"] == "1"
                assert not any(name.startswith("PENSTOCK_") for name in variables)
                waiting = asyncio.create_task(_call(host, "begin"))
                await until(lambda: "p_added" in host.remote_tools)
                os.kill(_program(process).pid, signal.SIGKILL)
                with pytest.raises(SandboxFailed, match="the program has ended"):
                    await waiting
                await until(lambda: not host.remote_tools)
                await until(lambda: bool(host.remote_tools))
                assert (await _call(host, "echo", text="again")).text == "you said again"

        asyncio.run(body())
        assert "MCP server 'gone'" in process.log and "secret-t" not in process.log


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    required_tool("bwrap")
    root = tmp_path_factory.mktemp("mcp")
    catalog = root / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", root / "chatml", context=4096))
    settings: dict[str, Any] = {"server.frontends": 2, "agent.mcp_config": str(config_of(root))}
    with serving(root, (MODEL,), settings, catalog=catalog) as running:
        yield running


def test_a_server_tells_its_tools_and_runs_a_call(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as asking:
        listed = wait_until(
            lambda: (found := asking.models.retrieve(MODEL).to_dict()).get("mcp_tools_count") and found
        )
        assert listed["mcp_tools_count"] == len(mcp_program.TOOLS)
        assert listed["mcp_servers_connected"] == 1 and listed["tools_available"] is True
        function = {"name": "p_echo", "arguments": '{"text":"hi"}'}
        call = {"type": "function", "id": "call-1", "function": function}
        messages: Any = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [call]}]
        tools: Any = [WEATHER]
        answer = asking.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, tool_choice="auto", max_tokens=4
        )
    assert answer.model_extra is not None
    [record, *_] = answer.model_extra["agentic_tool_calls"]
    assert (record["name"], record["result_content"]) == ("p_echo", "you said hi")
    assert server.metric("penstock_mcp_servers_connected") == 1
