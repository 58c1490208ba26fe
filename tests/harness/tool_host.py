"""A tool host of its own process, and a frontend's client in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from frontend.agent.host import ToolHost
from ipc.processes import starting
from ipc.processes.liveness import is_held
from ipc.processes.paths import TOOLS, RunPaths
from tests.conformance.required_tool import required_tool
from tests.fakes.tool_host import until
from tests.harness.parent import ends_with_parent
from tests.harness.server import wait_until


class HostProcess:
    """`python -m workers.tools` with a run directory below `root`."""

    def __init__(self, root: Path, before: Sequence[str] = (), **settings: object) -> None:
        """The arguments of the host are run by the program `before`, if there is one."""
        self.paths = RunPaths(root / "run", "t")
        chosen = {"code_execution": "true", "shell": "true"} | {name: str(v) for name, v in settings.items()}
        given = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        given |= {f"PENSTOCK_AGENT__{name.upper()}": value for name, value in chosen.items()}
        given |= {"PENSTOCK_RUN__DIR": str(self.paths.root), "PENSTOCK_LOG__FORMAT": "text"}
        self._environment = starting.environment(given)
        self._log = root / "tools.log"
        self._command = [*before, *starting.command("workers.tools")]
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start, without waiting."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=ends_with_parent(),
            )

    @property
    def log(self) -> str:
        """Everything that the host has logged."""
        return self._log.read_text()

    def tree(self) -> list[psutil.Process]:
        """All processes below the host."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """End in order; the exit code."""
        self.process.terminate()
        return self.process.wait(60)

    def assert_nothing_left(self) -> None:
        """Neither socket, lock, work directory nor stack in the log."""
        assert not self.paths.tools_socket().exists()
        assert not is_held(self.paths.lock(TOOLS))
        assert not self.paths.tools_work().exists()
        assert "Traceback" not in self.log


@contextlib.contextmanager
def tool_host(root: Path, before: Sequence[str] = (), **settings: object) -> Iterator[HostProcess]:
    """A host that listens; afterwards it is stopped and has left nothing."""
    if settings.get("sandbox") != "off":
        required_tool("bwrap")
    host = HostProcess(root, before, **settings)
    host.start()
    try:
        wait_until(lambda: host.paths.tools_socket().is_socket() or host.process.poll() is not None)
        assert host.process.poll() is None, host.log
        yield host
        if host.process.poll() is None:
            assert host.stop() == 0, host.log
            host.assert_nothing_left()
    finally:
        if host.process.poll() is None:
            host.process.kill()
            host.process.wait()


@asynccontextmanager
async def client(host: HostProcess) -> AsyncIterator[ToolHost]:
    """A client that has heard what the host offers."""
    found = ToolHost(host.paths.tools_socket())
    linking = asyncio.create_task(found.run_link())
    try:
        await until(lambda: found.ready is not None)
        yield found
    finally:
        linking.cancel()
        await asyncio.wait([linking])


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of these have ended."""
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)
