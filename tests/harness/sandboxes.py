"""Sandboxes of the tool host in the test's process: calls, and what must be gone afterwards."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from ipc.settings import Agent
from ipc.wire.tools import Call, PythonCall, PythonResult, ShellCall, ShellResult, close_all
from tests.conformance.required_tool import lacking, required_tool
from workers.tools import layers
from workers.tools.layers import ACTIVE, Layers
from workers.tools.sandboxes import Outcome, Sandboxes


@functools.cache
def found_layers(**settings: object) -> Layers:
    """The layers of this machine under settings of `agent`. Skips a test where one is missing that tests need."""
    required_tool("bwrap")
    if not _gives_namespaces():
        pytest.skip("the kernel of this machine refuses namespaces")
    found = layers.find(Agent(code_execution=True, shell=True, **settings))  # type: ignore[arg-type]
    found.take_groups()
    for name in ("namespaces", "seccomp", "landlock", "limits"):
        if found.states[name] not in (ACTIVE, "off by agent.sandbox"):
            lacking(f"the sandbox lacks the layer {name}: {found.states[name]}")
    return found


def _gives_namespaces() -> bool:
    """Whether the plainest sandbox of bubblewrap starts; containers often refuse them."""
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


class Box:
    """One sandbox by name; `produced` has the bytes or the error of each file of the last call."""

    def __init__(self, sandboxes: Sandboxes, name: str = "one") -> None:
        self.sandboxes, self.name = sandboxes, name
        self.produced: dict[str, bytes | str] = {}
        self.left = 0

    async def run(self, call: Call) -> Outcome:
        """Run a call in its turn."""
        sandbox = await self.sandboxes.get(None, self.name)
        async with sandbox.turn():
            outcome = await sandbox.run(call)
        fds = iter(outcome.fds)
        self.produced = {
            each.path: each.error or os.pread(next(fds), 1 << 20, 0) for each in outcome.produced
        }
        self.left = outcome.left
        close_all(outcome.fds)
        return outcome

    async def python(self, code: str, timeout_s: float = 60.0) -> PythonResult:
        """Run code."""
        result = (await self.run(PythonCall(code, timeout_s=timeout_s))).result
        assert isinstance(result, PythonResult)
        return result

    async def shell(self, *commands: str, timeout_s: float = 60.0, max_chars: int = 4096) -> ShellResult:
        """Run commands."""
        result = (await self.run(ShellCall([*commands], timeout_s=timeout_s, max_chars=max_chars))).result
        assert isinstance(result, ShellResult)
        return result

    async def put(self, path: str, data: bytes) -> None:
        """Mount a file."""
        sandbox = await self.sandboxes.get(None, self.name)
        fd = os.memfd_create("input")
        os.pwrite(fd, data, 0)
        try:
            async with sandbox.turn():
                await sandbox.put(fd, path)
        finally:
            os.close(fd)


def in_box(root: Path, chosen: Layers, body: Callable[[Box], Awaitable[None]]) -> None:
    """Run a test in sandboxes with these layers; afterwards no process, work directory or descriptor is left."""

    async def run() -> None:
        sandboxes = Sandboxes(chosen.config, chosen, root)
        try:
            await body(Box(sandboxes))
        finally:
            await sandboxes.close()

    root.mkdir(exist_ok=True)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    fds = psutil.Process().num_fds()
    asyncio.run(run())
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not [child.cmdline() for child in left]
    assert not list(root.iterdir())
    assert psutil.Process().num_fds() <= fds
