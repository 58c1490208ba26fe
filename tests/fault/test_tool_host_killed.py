"""The tool host and its frontends die in the midst of calls; nothing hangs, runs twice or stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from frontend.agent.host import ToolHost
from ipc.errors import SandboxFailed, ToolHostLost
from ipc.processes.paths import TOOLS
from ipc.wire.tools import PythonCall, PythonResult, ResetCall, ShellCall, ShellResult, close_all
from tests.conformance.required_tool import required_tool
from tests.fakes.tool_host import until
from tests.harness.sandboxes import found_layers
from tests.harness.server import eventually, serving, wait_until
from tests.harness.tool_host import HostProcess, client, gone, tool_host

LONG = ShellCall(["echo begun >> marks; sleep 4713"])


def test_a_call_over_the_socket_brings_results_and_files(tmp_path: Path) -> None:
    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            assert tools.ready is not None
            assert tools.ready.layers["namespaces"] == "active"
            assert (tools.ready.python, tools.ready.shell) == (True, True)
            fd = os.memfd_create("input")
            os.pwrite(fd, b"3", 0)
            await tools.mount("s", "n.txt", fd, lasting=True)
            os.close(fd)
            code = PythonCall("n = int(open('n.txt').read())\nopen('out.txt', 'w').write(str(n * 2))\nn")
            done, files = await tools.run("s", code, lasting=True)
            assert isinstance(done.result, PythonResult)
            assert done.result.result == "3"
            assert [(each.path, os.pread(each.fd or -1, 9, 0)) for each in files] == [("out.txt", b"6")]
            close_all([each.fd for each in files if each.fd is not None])
            await tools.mount("s", "../x", 0, lasting=True)
            with pytest.raises(SandboxFailed, match="could not be put into the sandbox"):
                await tools.run("s", ResetCall(), lasting=True)
            await tools.end("s")
            done, _ = await tools.run("s", ShellCall(["ls"]), lasting=True)
            assert isinstance(done.result, ShellResult)
            assert done.result.stdout == "", "the work directory of an ended sandbox was kept"

    with tool_host(tmp_path) as host:
        asyncio.run(body(host))
        assert stat.S_IMODE(host.paths.tools_socket().stat().st_mode) == 0o600


def test_the_death_of_the_host_fails_its_calls_once_and_ends_all_their_processes(tmp_path: Path) -> None:
    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            calls = [asyncio.create_task(tools.run(name, LONG, lasting=True)) for name in "abc"]
            code = PythonCall("open('begun', 'w').close()\nwhile True: pass")
            calls.append(asyncio.create_task(tools.run("d", code, lasting=False)))
            await until(lambda: len(running_sleeps(host)) == 3)
            await until(lambda: bool(list(host.paths.tools_work().glob("*/begun"))))
            below = host.tree()
            host.process.kill()
            for call in calls:
                with pytest.raises(ToolHostLost):
                    await call
            host.process.wait()
            await until(lambda: gone(below))
            assert not has_mounts(host.paths.tools_work())
            host.start()
            await until(lambda: tools.ready is not None)
            done, _ = await tools.run("a", ShellCall(["cat marks"]), lasting=True)
            assert isinstance(done.result, ShellResult)
            assert done.result.exit_code == 1, "a work directory outlived its host"

    with tool_host(tmp_path) as host:
        asyncio.run(body(host))


def has_mounts(place: Path) -> bool:
    """Whether a file system is mounted at `place` or below."""
    return str(place) in Path("/proc/self/mounts").read_text()


def running_sleeps(host: HostProcess) -> list[psutil.Process]:
    """The commands of `LONG` that run."""
    found = []
    for each in host.tree():
        try:
            if each.cmdline() == ["sleep", "4713"]:
                found.append(each)
        except psutil.Error:
            continue
    return found


def test_the_death_of_a_frontend_ends_its_calls_and_throw_away_sandboxes_only(tmp_path: Path) -> None:
    async def body(host: HostProcess) -> None:
        async with client(host) as stays:
            async with client(host) as dies:
                await dies.run("kept", PythonCall("x = 5"), lasting=True)
                await dies.run("thrown", PythonCall("x = 6"), lasting=False)
                call = asyncio.create_task(dies.run("kept", LONG, lasting=True))
                await until(lambda: len(running_sleeps(host)) == 1)
            with pytest.raises(ToolHostLost):
                await call
            await until(lambda: not running_sleeps(host))
            done, _ = await stays.run("kept", PythonCall("x"), lasting=True)
            assert isinstance(done.result, PythonResult)
            assert done.result.result == "5"
            await until(lambda: len(list(host.paths.tools_work().iterdir())) == 1)

    with tool_host(tmp_path) as host:
        asyncio.run(body(host))


def test_the_clean_up_of_a_cancelled_call_ends_before_the_next_call_of_the_sandbox(tmp_path: Path) -> None:
    """The call is cancelled and its frontend ends meanwhile: both want the same end."""
    code = "import time\nopen('begun', 'w').close()\ntry: time.sleep(1000)\n"
    code += "except KeyboardInterrupt:\n  time.sleep(0.3)\n  x = 9"

    async def body(host: HostProcess) -> None:
        async with client(host) as stays:
            async with client(host) as dies:
                call = asyncio.create_task(dies.run("kept", PythonCall(code), lasting=True))
                await until(lambda: bool(list(host.paths.tools_work().glob("*/begun"))))
                call.cancel()
                await asyncio.wait([call])
            done, _ = await stays.run("kept", PythonCall("x"), lasting=True)
            assert isinstance(done.result, PythonResult)
            assert done.result.result == "9"

    with tool_host(tmp_path) as host:
        asyncio.run(body(host))


def test_a_host_that_is_told_to_end_finishes_its_calls(tmp_path: Path) -> None:
    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            call = asyncio.create_task(
                tools.run("a", ShellCall(["touch begun; sleep 1; echo end"]), lasting=True)
            )
            await until(lambda: bool(list(host.paths.tools_work().glob("*/begun"))))
            host.process.terminate()
            done, _ = await call
            assert isinstance(done.result, ShellResult)
            assert done.result.stdout == "end\n"

    with tool_host(tmp_path) as host:
        asyncio.run(body(host))
        assert host.process.wait(60) == 0
        host.assert_nothing_left()


def test_cancelled_calls_leave_no_process_and_no_descriptor(tmp_path: Path) -> None:
    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            await tools.run("a", ShellCall(["true"]), lasting=True)
            before = psutil.Process(host.process.pid).num_fds()
            for _ in range(5):
                call = asyncio.create_task(tools.run("a", LONG, lasting=True))
                await until(lambda: len(running_sleeps(host)) == 1)
                call.cancel()
                await asyncio.wait([call])
                await until(lambda: not running_sleeps(host))
            await tools.run("a", ShellCall(["true"]), lasting=True)
            await until(lambda: psutil.Process(host.process.pid).num_fds() <= before + 2)

    with tool_host(tmp_path) as host:
        asyncio.run(body(host))


def test_without_namespaces_children_that_leave_their_group_end_with_the_call(tmp_path: Path) -> None:
    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            await tools.run(
                "a", ShellCall(["(setsid sleep 4714 &) ; setsid sleep 4714 & sleep 0.2"]), lasting=True
            )
            # The number is of this test alone, as others run at the same time. A killed process is there for a moment.
            await until(
                lambda: (
                    not any(
                        each.info["cmdline"] == ["sleep", "4714"] for each in psutil.process_iter(["cmdline"])
                    )
                )
            )

    with tool_host(tmp_path, sandbox="off") as host:
        asyncio.run(body(host))
        assert "the sandbox lacks the layer namespaces: off by agent.sandbox" in host.log


def test_a_missing_layer_is_fatal_with_on_and_named_with_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required_tool("bwrap")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    refusing = HostProcess(tmp_path, sandbox="on")
    refusing.start()
    assert refusing.process.wait(60) == 5
    assert (
        "agent.sandbox = on: layers are missing: namespaces (bubblewrap (bwrap) is not installed)"
        in refusing.log
    )

    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            done, _ = await tools.run("a", ShellCall(["/bin/cat /etc/shadow"]), lasting=True)
            assert isinstance(done.result, ShellResult)
            assert "denied" in done.result.stderr, "Landlock works without bubblewrap"

    host = HostProcess(tmp_path, sandbox="auto")
    host.start()
    wait_until(lambda: host.paths.tools_socket().is_socket())
    asyncio.run(body(host))
    assert "the sandbox lacks the layer namespaces: bubblewrap (bwrap) is not installed" in host.log
    assert host.stop() == 0
    host.assert_nothing_left()


FORBID_NAMESPACES = """
import os, sys
import pyseccomp as s
rules = s.SyscallFilter(s.ALLOW)
rules.add_rule(s.ERRNO(1), "unshare")
rules.add_rule(s.ERRNO(38), "clone3")
rules.add_rule(s.ERRNO(1), "clone", s.Arg(0, s.MASKED_EQ, 0x10000000, 0x10000000))
rules.load()
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a program that the kernel refuses user namespaces, as containers and hardened machines do."""


def test_where_namespaces_are_refused_auto_starts_and_says_so_and_on_refuses(tmp_path: Path) -> None:
    found_layers()
    before = [sys.executable, "-c", FORBID_NAMESPACES]
    refusing = HostProcess(tmp_path, before, sandbox="on")
    refusing.start()
    assert refusing.process.wait(60) == 5
    assert re.search(
        r"agent.sandbox = on: layers are missing: namespaces \(bwrap: .*\); network", refusing.log
    )

    async def body(host: HostProcess) -> None:
        async with client(host) as tools:
            done, _ = await tools.run("a", ShellCall(["/bin/cat /etc/shadow; echo ran"]), lasting=True)
            assert isinstance(done.result, ShellResult)
            assert "denied" in done.result.stderr, "Landlock works without namespaces"
            assert done.result.stdout == "ran\n"

    with tool_host(tmp_path, before, sandbox="auto") as host:
        asyncio.run(body(host))
        assert "the sandbox lacks the layer namespaces: bwrap: " in host.log
        assert "the sandbox lacks the layer network: needs namespaces" in host.log


def test_a_host_ends_the_starts_that_the_one_before_has_left(tmp_path: Path) -> None:
    host = HostProcess(tmp_path, sandbox="off")
    idle = "import time; print('up', flush=True); time.sleep(1000)"
    words = ["bwrap", "-c", idle, "--bind", f"{host.paths.tools_work()}/0123", "/mnt/data"]
    with subprocess.Popen(words, executable=sys.executable, stdout=subprocess.PIPE) as left:
        try:
            assert left.stdout is not None
            left.stdout.readline()
            with tool_host(tmp_path, sandbox="off"):
                assert left.wait(30) == -signal.SIGKILL
        finally:
            left.kill()


def test_a_second_host_of_a_run_directory_is_refused(tmp_path: Path) -> None:
    with tool_host(tmp_path, sandbox="off") as host:
        second = HostProcess(tmp_path, sandbox="off")
        second.start()
        assert second.process.wait(60) == 3
        assert "tools-0.lock is held by another live process" in second.log
        assert host.process.poll() is None


def test_a_server_starts_its_host_again_and_leaves_nothing(tmp_path: Path) -> None:
    required_tool("bwrap")
    settings = {"agent.code_execution": "true", "agent.shell": "true"}
    with serving(tmp_path, settings=settings) as server:
        lock = server.run_dir / f"{TOOLS}.lock"
        first = int(wait_until(lambda: lock.exists() and lock.read_text().strip()))
        os.kill(first, signal.SIGKILL)

        def again() -> bool:
            pid = lock.read_text().strip()
            return bool(pid) and int(pid) != first

        wait_until(again, 60, "the return of the tool host")
        workers = server.starts(0)

        async def call() -> None:
            tools = ToolHost(server.run_dir / f"{TOOLS}.sock")
            linking = asyncio.create_task(tools.run_link())

            async def ready() -> bool:
                return tools.ready is not None

            await eventually(ready, "the tool host")
            done, _ = await tools.run("a", PythonCall("1 + 1"), lasting=True)
            assert isinstance(done.result, PythonResult)
            assert done.result.result == "2"
            linking.cancel()
            await asyncio.wait([linking])

        asyncio.run(call())
        scraped = server.get("/metrics").body.decode()
        assert 'penstock_tool_calls_total{outcome="success",tool="python"} 1.0' in scraped
        assert 'penstock_tool_sandbox_layer{layer="namespaces"} 1.0' in scraped
        assert 'penstock_worker_restarts_total{reason="signal-9",worker="tools-0"} 1.0' in scraped
        assert 'penstock_quarantined{worker="worker-0"} 0.0' in scraped
        assert server.starts(0) == workers
    assert not (server.run_dir / f"{TOOLS}.sock").exists()
