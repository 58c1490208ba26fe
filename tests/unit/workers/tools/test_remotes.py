"""MCP servers of the tool host: a program over pipes, streamable HTTP, a WebSocket, and what servers may do wrong."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from ipc.mcp_servers import McpConfig, Process
from ipc.settings import Agent
from ipc.wire.tools import RemoteCall, RemoteResult, Remotes
from tests.fakes import mcp_program
from tests.fakes.mcp_program import TOOLS
from tests.fakes.mcp_servers import PROGRAM, http_server, socket_server
from tests.fakes.tool_host import until
from workers.tools import layers, remotes, transports
from workers.tools.processes import Broken
from workers.tools.remotes import McpServers, is_plain
from workers.tools.rpc import MAX_ID_CHARS, MAX_UNASKED, RemoteFailed, RemoteGone, Session, Transport
from workers.tools.transports import Program

Source = dict[str, Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow one another at once."""
    monkeypatch.setattr(remotes, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remotes, "LIST_PAUSE_S", 0.0)
    monkeypatch.setattr(transports, "LISTEN_AGAIN_S", 0.01)


@pytest.fixture(scope="module")
def no_layers() -> layers.Layers:
    """Programs run without a sandbox."""
    return layers.find(Agent(sandbox="off"))


class Host:
    """The servers of a test."""

    def __init__(self, found: McpServers) -> None:
        self.found = found

    @property
    def state(self) -> Remotes:
        """What frontends are told."""
        return self.found.state

    async def call(self, name: str, **arguments: Any) -> RemoteResult:
        """Call a tool."""
        return await self.found.call(RemoteCall(name, orjson.dumps(arguments).decode()))


@asynccontextmanager
async def host(no_layers: layers.Layers, root: Path, *servers: Source, **fields: Any) -> AsyncIterator[Host]:
    """Servers by their sources; `fields` are of the configuration. The names and prefixes are a, b, ..."""
    named = [
        {"name": f"server {name}", "tool_prefix": name, "source": source, **source.pop("with", {})}
        for name, source in zip("abc", map(dict, servers), strict=False)
    ]
    config = msgspec.convert({"servers": named, "auto_register_tools": True, **fields}, McpConfig)
    found = McpServers(config, no_layers, root, lambda state: None)
    running = asyncio.create_task(found.run())
    try:
        yield Host(found)
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert not any(os.scandir(root))


@asynccontextmanager
async def connected(
    serve: Callable[[], AbstractAsyncContextManager[Any]], no_layers: layers.Layers, root: Path, **fields: Any
) -> AsyncIterator[tuple[Any, Host]]:
    """The only server, over a network, and the host once the server is connected."""
    kind = "Http" if serve is http_server else "WebSocket"
    async with serve() as server, host(no_layers, root, {"type": kind, "url": server.url}, **fields) as found:
        await until(lambda: found.state.connected == 1)
        yield server, found


Test = Callable[[Host], Awaitable[None]]


def with_program(no_layers: layers.Layers, root: Path, test: Test, **fields: Any) -> None:
    """Run a test with one connected program."""

    async def run() -> None:
        async with host(no_layers, root, PROGRAM, **fields) as found:
            await until(lambda: found.state.connected == 1)
            await test(found)

    asyncio.run(run())


def test_a_program_tells_its_tools_over_all_pages_and_runs_them(
    tmp_path: Path, no_layers: layers.Layers
) -> None:
    async def test(found: Host) -> None:
        tools = found.state.tools
        assert [tool.name for tool in tools] == [f"a_{name}" for name in TOOLS]
        first = tools[0]
        assert (first.server, first.description, first.strict) == ("server a", "Does echo.", True)
        assert await found.call("a_echo", text="hi") == RemoteResult("success", "you said hi")
        assert await found.call("a_error") == RemoteResult("error", "it went wrong")
        told = await found.call("a_parts")
        assert told.text == "[image, 3 bytes, which is not shown]\nof a resource\nfile:///b"

    with_program(no_layers, tmp_path, test)


def test_a_program_has_its_own_variables_only_and_a_directory_that_goes_with_the_program(
    tmp_path: Path, no_layers: layers.Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s")

    async def run() -> None:
        async with host(no_layers, tmp_path, {**PROGRAM, "env": {"OWN": "1"}}) as found:
            await until(lambda: found.state.connected == 1)
            variables, directory = orjson.loads((await found.call("a_env")).text)
            assert variables["OWN"] == "1" and "SECRET_OF_THE_HOST" not in variables
            assert Path(directory).parent == tmp_path

    asyncio.run(run())


def test_a_program_that_fills_its_directory_is_ended_and_tried_again(
    tmp_path: Path,
    no_layers: layers.Layers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(transports, "WATCH_EVERY_S", 0.01)
    small = replace(no_layers, config=Agent(sandbox="off", max_workdir_bytes=1 << 20))

    async def run() -> None:
        async with host(small, tmp_path, PROGRAM) as found:
            await until(lambda: found.state.connected == 1)
            _, first = orjson.loads((await found.call("a_env")).text)
            assert (await found.call("a_write", text=str(1 << 19))).text == "it is written"
            assert (await found.call("a_echo", text="hi")).text == "you said hi"
            with suppress(Broken):
                # The program may be ended before its answer.
                await found.call("a_write", text=str(1 << 21))
            await until(lambda: "its work directory takes" in caplog.text)
            await until(lambda: not Path(first).exists())
            await until(lambda: found.state.connected == 1)
            _, second = orjson.loads((await found.call("a_env")).text)
            assert second != first and not any(os.scandir(second))

    asyncio.run(run())
    assert "agent.max_workdir_bytes allows 1048576" in caplog.text


def test_another_configuration_keeps_the_connections_of_servers_that_stay(
    tmp_path: Path, no_layers: layers.Layers
) -> None:
    def named(*names: str, **fields: Any) -> McpConfig:
        servers = [{"name": name, "tool_prefix": name, "source": PROGRAM} for name in names]
        return msgspec.convert({"servers": servers, "auto_register_tools": True, **fields}, McpConfig)

    async def run() -> None:
        found = McpServers(named("a", "b"), no_layers, tmp_path, lambda state: None)
        running, told = asyncio.create_task(found.run()), Host(found)

        async def directory(prefix: str) -> str:
            _, where = orjson.loads((await told.call(f"{prefix}_env")).text)
            return str(where)

        def prefixes() -> set[str]:
            return {tool.name.partition("_")[0] for tool in found.state.tools}

        try:
            await until(lambda: found.state.connected == 2)
            kept, gone = await directory("b"), await directory("a")
            found.use(named("b", "c"))
            assert prefixes() == {"b"}
            await until(lambda: found.state.connected == 2)
            assert prefixes() == {"b", "c"}
            assert await directory("b") == kept
            await until(lambda: not Path(gone).exists())
            with pytest.raises(Broken, match="not connected"):
                await told.call("a_echo", text="hi")
            found.use(named("b", "c", tool_timeout_secs=9))
            await until(lambda: found.state.connected == 2)
            assert await directory("b") != kept
            found.use(named())
            assert found.state == Remotes(0, [])
        finally:
            running.cancel()
            await asyncio.wait([running])
        assert not any(os.scandir(tmp_path))

    asyncio.run(run())


def test_a_stop_waits_for_servers_that_have_just_left_the_configuration(
    tmp_path: Path, no_layers: layers.Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        closing, closed = asyncio.Event(), list[str]()

        class Slow(Transport):
            """Does not connect, and takes many steps to close."""

            async def open(self) -> None:
                raise RemoteGone("no server")

            async def send(self, message: bytes, id_: int | None) -> None:
                raise AssertionError

            async def close(self) -> None:
                closing.set()
                for _ in range(100):
                    await asyncio.sleep(0)
                closed.append("whole")

        monkeypatch.setattr(remotes, "_maker", lambda *_: Slow)
        fields: Source = {"servers": [{"name": "a", "source": PROGRAM}], "auto_register_tools": True}
        config = msgspec.convert(fields, McpConfig)
        found = McpServers(config, no_layers, tmp_path, lambda state: None)
        running = asyncio.create_task(found.run())
        await closing.wait()
        found.use(msgspec.convert({**fields, "servers": []}, McpConfig))
        for _ in range(3):
            # The first cancellation reaches the server before the second one is made.
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert closed == ["whole"]

    asyncio.run(run())


def test_an_error_of_the_protocol_fails_the_call_and_keeps_the_connection(
    tmp_path: Path, no_layers: layers.Layers
) -> None:
    async def test(found: Host) -> None:
        with pytest.raises(Broken, match="no such thing"):
            await found.call("a_fail")
        assert (await found.call("a_ask")).text == ""
        assert found.state.connected == 1

    with_program(no_layers, tmp_path, test)


def test_tools_that_change_are_read_again(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def test(found: Host) -> None:
        await found.call("a_more")
        await until(lambda: found.state.tools[-1].name == "a_added")

    with_program(no_layers, tmp_path, test)


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("a_die", "the program has ended with 3: 'the end is near'"),
        ("a_rubbish", "something that is no JSON"),
        ("a_huge", "a message of over"),
        ("a_flood", f"over {MAX_UNASKED} messages"),
    ],
)
def test_a_server_that_breaks_the_rules_fails_its_call_and_is_tried_again(
    tmp_path: Path, no_layers: layers.Layers, tool: str, reason: str
) -> None:
    async def test(found: Host) -> None:
        with pytest.raises(Broken, match=reason):
            await found.call(tool)
        await until(lambda: found.state.connected == 0)
        await until(lambda: found.state.connected == 1)
        assert (await found.call("a_echo", text="again")).text == "you said again"

    with_program(no_layers, tmp_path, test)


def test_a_call_that_is_not_answered_ends_in_time_and_the_server_is_told(
    tmp_path: Path, no_layers: layers.Layers
) -> None:
    async def run() -> None:
        async with socket_server() as server:
            source = {"type": "WebSocket", "url": server.url}
            async with host(no_layers, tmp_path, source, tool_timeout_secs=5) as found:
                await until(lambda: found.state.connected == 1)
                found.found._servers[0].timeout_s = 0.05
                with pytest.raises(Broken, match=r"no answer came within 0\.05 s"):
                    await found.call("a_wait")
                heard = server.scripts[0].heard
                await until(lambda: heard[-1]["method"] == "notifications/cancelled")
                asked = next(each for each in heard if each["method"] == "tools/call")
                assert heard[-1]["params"] == {"requestId": asked["id"]}

    asyncio.run(run())


def test_a_caller_that_leaves_cancels_the_call_at_the_server(
    tmp_path: Path, no_layers: layers.Layers
) -> None:
    async def run() -> None:
        async with connected(socket_server, no_layers, tmp_path) as (server, found):
            calling = asyncio.create_task(found.call("a_wait"))
            heard = server.scripts[0].heard
            await until(lambda: heard[-1]["method"] == "tools/call")
            calling.cancel()
            await until(lambda: heard[-1]["method"] == "notifications/cancelled")

    asyncio.run(run())


@pytest.mark.parametrize("is_json", [False, True])
def test_streamable_http_keeps_a_session_with_the_token_and_the_headers(
    tmp_path: Path, no_layers: layers.Layers, is_json: bool
) -> None:
    async def run() -> None:
        async with http_server() as server:
            server.is_json = is_json
            source = {
                "type": "Http",
                "url": server.url,
                "headers": {"X-Own": "1"},
                "with": {"bearer_token": "t"},
            }
            async with host(no_layers, tmp_path, source) as found:
                await until(lambda: found.state.connected == 1)
                assert (await found.call("a_echo", text="hi")).text == "you said hi"
                last = server.requests[-1].headers
                assert (last["Authorization"], last["X-Own"]) == ("Bearer t", "1")
                assert last["Mcp-Session-Id"] in server.sessions
                assert last["MCP-Protocol-Version"] == "2025-11-25"
            assert server.sessions == set()

    asyncio.run(run())


def test_a_server_over_http_tells_changes_on_a_stream_of_its_own(
    tmp_path: Path, no_layers: layers.Layers
) -> None:
    async def run() -> None:
        async with connected(http_server, no_layers, tmp_path) as (server, found):
            await until(lambda: bool(server.listening))
            server.script.tools.append("added")
            changed = b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n'
            await server.listening[0].write(changed)
            await until(lambda: found.state.tools[-1].name == "a_added")

    asyncio.run(run())


def test_a_forgotten_session_is_begun_again(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def run() -> None:
        async with connected(http_server, no_layers, tmp_path) as (server, found):
            server.sessions.clear()
            with pytest.raises(Broken, match="forgotten the session"):
                await found.call("a_echo")
            await until(lambda: bool(server.sessions) and found.state.connected == 1)
            assert (await found.call("a_echo", text="x")).text == "you said x"

    asyncio.run(run())


def test_statuses_and_large_answers_over_http_fail_one_call(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def run() -> None:
        async with connected(http_server, no_layers, tmp_path) as (server, found):
            for status in (307, 500):
                server.status = status
                with pytest.raises(Broken, match=f"status {status}"):
                    await found.call("a_echo")
            server.status = 0
            for server.is_json in (False, True):
                with pytest.raises(Broken, match="a message of over"):
                    await found.call("a_huge")
            assert found.state.connected == 1
            assert not any(request.path.endswith("elsewhere") for request in server.requests)

    asyncio.run(run())


def test_a_server_that_cannot_be_reached_costs_its_own_tools_only(
    tmp_path: Path, no_layers: layers.Layers, caplog: pytest.LogCaptureFixture
) -> None:
    gone: Source = {"type": "Http", "url": "http://127.0.0.1:9/mcp", "with": {"bearer_token": "secret-t"}}
    program: Source = {"type": "Process", "command": "/does/not/exist"}

    async def run() -> None:
        async with host(no_layers, tmp_path, gone, PROGRAM, program) as found:
            await until(lambda: found.state.connected == 1)
            assert (await found.call("b_echo", text="hi")).text == "you said hi"
            with pytest.raises(Broken, match="not connected"):
                await found.call("a_echo")
            await until(lambda: caplog.text.count("server a") > 1 and caplog.text.count("server c") > 1)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert "'server c': the program cannot be started: [Errno 2] No such file" in caplog.text
    assert "the server does not answer" in caplog.text and "secret-t" not in caplog.text


def test_pauses_between_tries_double_up_to_a_minute(
    tmp_path: Path,
    no_layers: layers.Layers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remotes, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(remotes, "LONGEST_PAUSE_S", 0.004)

    async def run() -> None:
        async with host(no_layers, tmp_path, {"type": "WebSocket", "url": "ws://127.0.0.1:9/"}):
            await until(lambda: caplog.text.count("0.004 s") >= 2)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    pauses = [line.rpartition("comes in ")[2] for line in caplog.text.splitlines() if "comes in" in line]
    assert pauses[:4] == ["0.001 s", "0.002 s", "0.004 s", "0.004 s"]


def test_hostile_lists_of_tools_are_bounded_by_number_name_and_size(
    tmp_path: Path,
    no_layers: layers.Layers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    large = {"type": "object", "description": "x" * remotes.MAX_SCHEMA_NBYTES}
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"a": deep}
    listed: list[Any] = [
        {"name": "good", "description": "\0" + "d" * 5000, "inputSchema": {"type": "object", "$ref": "#/a"}},
        *(
            {"name": name, "inputSchema": mcp_program.WORDS}
            for name in ("good", "a b", "", "\n", "x" * 200, 7)
        ),
        {"name": "large", "inputSchema": large},
        {"name": "bare"},
        {"name": "deep", "inputSchema": {"type": "object", "properties": deep}},
        {"name": "text", "inputSchema": {"type": "string"}},
        "no object",
        *({"name": f"n{number}", "inputSchema": mcp_program.WORDS} for number in range(500)),
    ]

    async def run() -> None:
        async with socket_server() as server:
            monkeypatch.setattr(mcp_program, "tool", lambda each: each)
            monkeypatch.setattr(mcp_program, "TOOLS", listed)
            async with host(no_layers, tmp_path, {"type": "WebSocket", "url": server.url}) as found:
                await until(lambda: found.state.connected == 1)
                tools = found.state.tools
                assert [tool.name for tool in tools[:3]] == ["a_good", "a_n0", "a_n1"]
                assert len(tools) == remotes.MAX_TOOLS
                assert tools[0].description == "d" * (remotes.MAX_DESCRIPTION_CHARS) and not tools[0].strict

    asyncio.run(run())
    assert "384 tools are left out: 'good' (its name" in caplog.text and "'a_\\n' is no name" in caplog.text


def test_all_tools_together_are_bounded_and_a_name_belongs_to_the_first_server(
    tmp_path: Path, no_layers: layers.Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "MAX_ALL_NBYTES", 1000)

    async def run() -> None:
        async with socket_server() as server:
            source: Source = {"type": "WebSocket", "url": server.url}
            second = {**source, "with": {"tool_prefix": "a"}}
            async with host(no_layers, tmp_path, source, second) as found:
                await until(lambda: found.state.connected == 2)
                names = [tool.name for tool in found.state.tools]
                assert 0 < len(names) < len(TOOLS) and len(set(names)) == len(names)

    asyncio.run(run())


def test_without_registering_no_tool_is_offered(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def test(found: Host) -> None:
        assert found.state == Remotes(1, [])

    with_program(no_layers, tmp_path, test, auto_register_tools=False)


def test_calls_beyond_the_places_wait(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def run() -> None:
        async with socket_server() as server:
            source = {"type": "WebSocket", "url": server.url}
            async with host(no_layers, tmp_path, source, max_concurrent_calls=1) as found:
                await until(lambda: found.state.connected == 1)
                first = asyncio.create_task(found.call("a_wait"))
                heard = server.scripts[0].heard
                await until(lambda: heard[-1]["method"] == "tools/call")
                second = asyncio.create_task(found.call("a_echo", text="2"))
                await asyncio.sleep(0)
                assert heard[-1]["params"]["name"] == "wait"  # type: ignore[index]
                first.cancel()
                assert (await second).text == "you said 2"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        (mcp_program.WORDS, True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, True),
        ({"type": "object", "additionalProperties": False}, True),
        ({"type": "object", "$ref": "#/$defs/a"}, False),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, False),
        ({"type": ["object", "null"]}, False),
        ({"type": "object", "properties": []}, False),
        ({"type": "thing"}, False),
    ],
)
def test_only_schemas_that_grammars_follow_make_a_tool_strict(schema: Any, plain: bool) -> None:
    assert is_plain(schema) is plain


def test_a_schema_of_many_levels_is_not_strict() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    assert not is_plain(schema)


def test_the_program_of_the_tests_needs_nothing_of_this_server() -> None:
    assert "from tests" not in inspect.getsource(mcp_program)


def test_arguments_of_several_lines_are_one_message(tmp_path: Path, no_layers: layers.Layers) -> None:
    inner = '{"jsonrpc":"2.0","id":99,"method":"tools/call","params":{"name":"die","arguments":{}}}'
    arguments = f'{{"text":\r"hi",\n"more":\r\n{inner}\n}}'

    async def test(found: Host) -> None:
        result = await found.found.call(RemoteCall("a_echo", arguments))
        assert result.text == "you said hi"
        assert (await found.call("a_echo", text="again")).text == "you said again"

    with_program(no_layers, tmp_path, test)


def test_a_program_that_does_not_read_is_sent_no_more(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def run() -> None:
        near, far = socket.socketpair()
        with far:
            program = Program(Process("unused"), no_layers, tmp_path)
            _, writer = await asyncio.open_unix_connection(sock=near)
            program._writer = writer
            message, sent = b"x" * (4 << 20), writer.transport.get_write_buffer_size
            first = asyncio.create_task(program.send(message, 1))
            await until(lambda: sent() > 1 << 20)
            kept = sent()
            for _ in range(3):
                sending = asyncio.create_task(program.send(message, 2))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                sending.cancel()
                await asyncio.wait([sending])
            assert sent() <= kept
            first.cancel()
            await asyncio.wait([first])
            writer.transport.abort()

    asyncio.run(run())


def test_more_calls_than_a_hundred_run_at_once_over_http(tmp_path: Path, no_layers: layers.Layers) -> None:
    async def run() -> None:
        async with connected(http_server, no_layers, tmp_path, max_concurrent_calls=200) as (server, found):
            before = len(server.requests)
            calls = [asyncio.create_task(found.call("a_wait")) for _ in range(101)]
            await until(lambda: len(server.requests) == before + 101)
            assert (await found.call("a_echo", text="hi")).text == "you said hi"
            for each in calls:
                each.cancel()
            await asyncio.wait(calls)

    asyncio.run(run())


def test_a_long_id_of_a_request_ends_the_connection(
    tmp_path: Path, no_layers: layers.Layers, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with connected(socket_server, no_layers, tmp_path) as (server, _):
            [connection], [script] = server.connections, server.scripts
            for id_ in ("x" * MAX_ID_CHARS, "y" * (MAX_ID_CHARS + 1)):
                ping = {"jsonrpc": "2.0", "id": id_, "method": "ping"}
                await connection.send(orjson.dumps(ping).decode())
                await until(lambda: script.heard[-1].get("id") == "x" * MAX_ID_CHARS)
            await until(lambda: "id has over" in caplog.text)

    asyncio.run(run())


class Stuck(Transport):
    """A server that takes no answers."""

    async def open(self) -> None:
        """Nothing to open."""

    async def send(self, message: bytes, id_: int | None) -> None:
        """Requests leave, answers do not."""
        if id_ is None:
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to close."""


def test_answers_that_a_server_does_not_take_are_bounded() -> None:
    async def run() -> None:
        session = Session(Stuck())
        for number in (1, 2):
            asking = asyncio.create_task(session.request("ping", {}, 60))
            await until(lambda number=number: number in session._waiting)  # type: ignore[misc]
            for _ in range(MAX_UNASKED):
                session.receive(b'{"jsonrpc":"2.0","id":7,"method":"ping"}')
            session.receive(orjson.dumps({"jsonrpc": "2.0", "id": number, "result": {}}))
            await asyncio.wait([asking])
            asking.exception()
        assert "takes no answers" in session.reason and len(session._tasks) <= MAX_UNASKED + 2
        await session.close()

    asyncio.run(run())


def test_events_in_pieces_of_one_byte_are_read_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "MAX_MESSAGE_NBYTES", 100)
    collector = transports._Events()
    text = b"event: message\r\ndata: a\r\ndata: b\r\n\r\ndata:c\n\n"
    found = [data for each in text for data in collector.feed(bytes([each]))]
    assert found == [b"a\nb", b"c"]
    with pytest.raises(RemoteFailed, match="a message of over"):
        for _ in range(101):
            collector.feed(b"x")
