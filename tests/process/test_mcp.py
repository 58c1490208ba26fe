"""MCP servers of the operator in real sandboxes, from a tool host and from a whole server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from frontend.agent.host import ToolHost
from ipc.errors import SandboxFailed
from ipc.wire.tools import RemoteCall, RemoteResult
from tests.conformance.required_tool import named_python, required_tool
from tests.fakes import mcp_program
from tests.fakes.mcp_servers import PROGRAM
from tests.fakes.tool_host import until
from tests.harness.later import openai
from tests.harness.ports import free_port
from tests.harness.server import Server, serving, wait_until
from tests.harness.tool_host import HostProcess, client, tool_host
from tests.tiny import chat_models

MODEL = "tiny/chatml"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

CLIENT = """
import asyncio, json, sys
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

async def main():
    async with streamable_http_client(sys.argv[1]) as streams:
        async with ClientSession(streams[0], streams[1]) as session:
            await session.initialize()
            await session.send_ping()
            tools = (await session.list_tools()).tools
            asked = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 4}
            answer = await session.call_tool("chat", asked)
            failed = False
            try:
                await session.call_tool("chat", {"messages": 7})
            except Exception as error:
                failed = "messages" in str(error)
            found = {"tools": [each.name for each in tools], "kinds": [each.type for each in answer.content]}
            print(json.dumps({**found, "error": failed}))

asyncio.run(main())
"""


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
    return next(each for each in host.tree() if each.cmdline()[1:2] == ["-c"])


def test_a_program_runs_in_a_sandbox_and_a_killed_one_fails_its_call_and_comes_back(tmp_path: Path) -> None:
    off = {"code_execution": "false", "shell": "false"}
    with tool_host(tmp_path, mcp_config=config_of(tmp_path, env={"OWN": "1"}), **off) as process:

        async def body() -> None:
            async with client(process) as host:
                await until(lambda: bool(host.remote_tools))
                assert host.remotes is not None and host.remotes.connected == 1
                await until(lambda: psutil.STATUS_ZOMBIE not in [each.status() for each in process.tree()])
                variables, directory = orjson.loads((await _call(host, "env")).text)
                assert directory == "/mnt/data" and variables["OWN"] == "1"
                assert not any(name.startswith("PENSTOCK_") for name in variables)
                waiting = asyncio.create_task(_call(host, "begin"))
                await until(lambda: "p_added" in host.remote_tools)
                os.kill(_program(process).pid, signal.SIGKILL)
                with pytest.raises(SandboxFailed, match="the program has ended"):
                    await waiting
                # The next program begins without the tool that the killed one has added.
                await until(lambda: bool(host.remote_tools) and "p_added" not in host.remote_tools)
                assert (await _call(host, "echo", text="again")).text == "you said again"
                await until(lambda: "MCP server 'gone'" in process.log)

        asyncio.run(body())
        assert "secret-t" not in process.log


def test_the_file_is_read_again_when_a_frontend_begins_and_a_mistake_changes_nothing(tmp_path: Path) -> None:
    off = {"code_execution": "false", "shell": "false"}
    path = config_of(tmp_path)
    with tool_host(tmp_path, mcp_config=path, **off) as process:

        async def body() -> None:
            async with client(process) as old:
                await until(lambda: "p_echo" in old.remote_tools)
                path.write_text(path.read_text().replace('"tool_prefix": "p"', '"tool_prefix": "q"'))
                async with client(process) as new:
                    await until(lambda: "q_echo" in new.remote_tools and "q_echo" in old.remote_tools)
                    assert "p_echo" not in old.remote_tools
                    path.write_text("{")
                    async with client(process) as newer:
                        await until(lambda: "q_echo" in newer.remote_tools)
                        await until(
                            lambda: "the MCP servers stay as they are: agent.mcp_config" in process.log
                        )
                        assert "q_echo" in old.remote_tools

        asyncio.run(body())


@pytest.fixture(scope="module")
def port() -> int:
    """The port of MCP."""
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Server]:
    required_tool("bwrap")
    root = tmp_path_factory.mktemp("mcp")
    catalog = root / "catalog"
    catalog.mkdir()
    chat_models.write_entry(catalog, MODEL, chat_models.save("chatml", root / "chatml", context=4096))
    settings: dict[str, Any] = {"server.frontends": 2, "agent.mcp_config": str(config_of(root))}
    settings["server.mcp_port"] = port
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
    wait_until(lambda: server.metric("penstock_mcp_servers_connected") == 1, what="the gauge")


def _mcp(port: int, message: Any) -> tuple[int, Any]:
    """Status and body of the answer to a message at the port of MCP."""
    body = {"jsonrpc": "2.0", "id": 1, **message}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/mcp",
        orjson.dumps(body),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return answer.status, orjson.loads(answer.read() or b"null")


def test_the_port_of_mcp_runs_chat_with_tools_of_the_server_and_nothing_else(
    server: Server, port: int
) -> None:
    wait_until(lambda: server.metric("penstock_mcp_servers_connected") == 1)
    assert _mcp(port, {"method": "tools/list"})[1]["result"]["tools"][0]["name"] == "chat"
    messages = [{"role": "user", "content": "Go."}]
    arguments = {"messages": messages, "tools": [WEATHER], "max_tokens": 4}
    status, told = _mcp(port, {"method": "tools/call", "params": {"name": "chat", "arguments": arguments}})
    assert status == 200 and isinstance(told["result"]["content"][0]["text"], str)
    assert server.get("/mcp").status == 404
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models")


def test_the_client_of_the_package_talks_to_the_port(server: Server, port: int) -> None:
    """The client comes by `pip install mcp`, in an environment of its own that `TEST_MCP_PYTHON` names."""
    python = named_python("TEST_MCP_PYTHON", "mcp")
    url = f"http://127.0.0.1:{port}/mcp"
    run = subprocess.run(
        [python, "-c", CLIENT, url], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert orjson.loads(run.stdout.splitlines()[-1]) == {"tools": ["chat"], "kinds": ["text"], "error": True}
