"""The frontend's client of the tool host, against a fake host over the real socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frontend.agent.host import ToolHost
from ipc.errors import SandboxFailed, ToolHostLost, ToolsUnavailable
from ipc.wire.tools import (
    Call,
    PythonCall,
    PythonResult,
    Remotes,
    RemoteTool,
    ShellCall,
    ShellResult,
)
from tests.fakes.tool_host import Answer, FakeToolHost, tool_host, until

OK = PythonResult("success", 1, "/mnt/data", stdout="3\n")


@asynccontextmanager
async def connected(path: Path, answer: Answer) -> AsyncIterator[tuple[ToolHost, FakeToolHost]]:
    """A client that has heard what the fake host offers."""
    async with tool_host(path, answer) as fake, client(path) as host:
        await until(lambda: host.ready is not None)
        yield host, fake


@asynccontextmanager
async def client(path: Path) -> AsyncIterator[ToolHost]:
    host = ToolHost(path)
    linking = asyncio.create_task(host.run_link())
    try:
        yield host
    finally:
        linking.cancel()
        await asyncio.wait([linking])


def run(tmp_path: Path, answer: Answer, test: Callable[[ToolHost, FakeToolHost], Awaitable[None]]) -> None:
    async def body() -> None:
        async with connected(tmp_path / "tools-0.sock", answer) as (host, fake):
            await test(host, fake)

    asyncio.run(body())


async def never(sandbox: str, call: Call) -> PythonResult:
    await asyncio.Event().wait()
    return OK


def test_a_call_brings_its_result_and_open_files(tmp_path: Path) -> None:
    async def answer(sandbox: str, call: Call) -> tuple[PythonResult, dict[str, bytes]]:
        return OK, {"plot.png": b"png", "a/b.txt": b"text"}

    async def body(host: ToolHost, fake: FakeToolHost) -> None:
        done, files = await host.run("s", PythonCall("print(3)"), lasting=True)
        assert done.result == OK
        assert [(each.path, each.nbytes, each.error) for each in files] == [
            ("plot.png", 3, ""),
            ("a/b.txt", 4, ""),
        ]
        assert [os.pread(each.fd, 9, 0) for each in files if each.fd is not None] == [b"png", b"text"]
        for each in files:
            os.close(each.fd or -1)
        assert fake.runs[0].lasting

    run(tmp_path, answer, body)


def test_calls_end_in_any_order_and_a_failed_sandbox_raises(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def answer(sandbox: str, call: Call) -> ShellResult | str:
        if sandbox == "slow":
            await release.wait()
            return ShellResult("success", "/mnt/data", exit_code=0)
        return "no room for the sandbox"

    async def body(host: ToolHost, fake: FakeToolHost) -> None:
        slow = asyncio.create_task(host.run("slow", ShellCall(["true"]), lasting=False))
        with pytest.raises(SandboxFailed, match="no room"):
            await host.run("other", ShellCall(["true"]), lasting=False)
        release.set()
        done, files = await slow
        assert done.result == ShellResult("success", "/mnt/data", exit_code=0)
        assert files == []

    run(tmp_path, answer, body)


def test_a_mounted_file_is_sent_by_descriptor_and_stays_open_here(tmp_path: Path) -> None:
    async def body(host: ToolHost, fake: FakeToolHost) -> None:
        (tmp_path / "input.csv").write_bytes(b"a,b")
        with (tmp_path / "input.csv").open("rb") as file:
            await host.mount("s", "input.csv", file.fileno(), lasting=True)
            await host.end("s")
            await until(lambda: fake.ended == ["s"])
            assert fake.mounted == [("s", "input.csv", b"a,b")]
            assert os.fstat(file.fileno()).st_size == 3

    run(tmp_path, never, body)


def test_a_cancelled_task_cancels_its_call(tmp_path: Path) -> None:
    async def body(host: ToolHost, fake: FakeToolHost) -> None:
        task = asyncio.create_task(host.run("s", PythonCall("1"), lasting=False))
        await until(lambda: len(fake.runs) == 1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await until(lambda: fake.cancelled == [fake.runs[0].id])

    run(tmp_path, never, body)


def test_the_death_of_the_host_fails_each_call_once_and_the_next_host_serves(tmp_path: Path) -> None:
    async def body(host: ToolHost, fake: FakeToolHost) -> None:
        calls = [asyncio.create_task(host.run(name, PythonCall("1"), lasting=True)) for name in "abc"]
        await until(lambda: len(fake.runs) == 3)
        fake.die()
        for call in calls:
            with pytest.raises(ToolHostLost, match="not repeated"):
                await call
        await until(lambda: host.ready is not None)
        assert len(fake.runs) == 3, "a call was sent again"

    run(tmp_path, never, body)


def test_without_a_host_calls_are_refused_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with client(tmp_path / "none.sock") as host:
            assert host.ready is None
            with pytest.raises(ToolsUnavailable):
                await host.run("s", PythonCall("1"), lasting=True)
            with pytest.raises(ToolsUnavailable):
                await host.mount("s", "x", 0, lasting=True)
            await host.end("s")

    asyncio.run(body())


def test_tools_of_mcp_servers_are_known_while_the_host_lives(tmp_path: Path) -> None:
    tool = RemoteTool("fs_read", "files", "", {"type": "object"}, strict=True)

    async def body(host: ToolHost, fake: FakeToolHost) -> None:
        assert host.remotes is None and host.remote_tools == {}
        fake.tell(Remotes(1, [tool]))
        await until(lambda: host.remotes == Remotes(1, [tool]))
        assert host.remote_tools == {"fs_read": tool}
        fake.tell(Remotes(0, []))
        await until(lambda: host.remote_tools == {})
        assert host.remotes == Remotes(0, [])
        fake.die()
        await until(lambda: host.remotes is None)

    run(tmp_path, never, body)
