"""Calls of the tool host against the same work by bare programs, in turn.

1. `true` by the shell tool, and `bwrap ... true` started bare, in turn. With `--pause` seconds between two calls the
   next shell has started by then, as between two rounds of a model.
2. A call of Python in a warm session, and a line to a bare child over pipes, in turn.
3. The first call of Python in a session, and the start of a bare interpreter that runs one line.
4. Memory of sessions without their interpreters: all other processes of a session, and the growth of the host.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from benchmarks.report import Report, Row
from ipc.settings import Agent
from ipc.wire.tools import Call, PythonCall, ShellCall
from workers.tools import layers
from workers.tools.sandboxes import Sandboxes

BWRAP = shlex.split(
    "bwrap --unshare-all --clearenv --die-with-parent --new-session --cap-drop ALL --unshare-user --disable-userns "
    "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc "
    "--dev /dev true"
)
ECHO = "import sys\nfor line in sys.stdin: exec(line); print(1, flush=True)"


async def in_turn(
    rounds: int, ours: Callable[[], Awaitable[object]], bare: Callable[[], object], pause_s: float = 0.0
) -> tuple[float, float]:
    """Medians of both in milliseconds."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        await ours()
        times[0].append(time.perf_counter() - began)
        await asyncio.sleep(pause_s)
        began = time.perf_counter()
        bare()
        times[1].append(time.perf_counter() - began)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


class Figures:
    """The table of one run."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.rows: list[Row] = []

    def add(self, what: str, target: float, ours_ms: float, bare_ms: float) -> None:
        """A row: medians in milliseconds, their ratio, and the largest ratio that is aimed at."""
        self.rows.append([what, ours_ms, bare_ms, ours_ms / bare_ms, target])
        self.report.say(f"{what}: {ours_ms:.2f} ms, bare {bare_ms:.2f} ms")


async def measure(options: argparse.Namespace, root: Path, figures: Figures) -> None:
    """All measurements, in one event loop."""
    config = Agent(code_execution=True, shell=True, max_sandboxes=1000)
    found = layers.find(config)
    found.take_groups()
    sandboxes = Sandboxes(config, found, root)

    async def call(name: str, what: Call) -> None:
        sandbox = await sandboxes.get(None, name)
        async with sandbox.turn():
            await sandbox.run(what)

    shell, code = ShellCall(["true"]), PythonCall("1")
    rounds = options.rounds
    bare_shell = lambda: subprocess.run(BWRAP, check=True)  # noqa: E731
    figures.add("true, shell after shell", 3, *await in_turn(rounds, lambda: call("a", shell), bare_shell))
    paused = await in_turn(rounds, lambda: call("a", shell), bare_shell, options.pause)
    figures.add(f"true, {options.pause:g} s apart", 3, *paused)
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-I", "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def line() -> None:
            stdin.write("1\n")
            stdin.flush()
            stdout.readline()

        line()
        await call("a", code)
        figures.add("warm Python", 10, *await in_turn(rounds * 20, lambda: call("a", code), line))
        stdin.close()
    names = iter(range(10**9))
    start = [sys.executable, "-I", "-c", "1"]
    first = await in_turn(
        rounds, lambda: call(f"f{next(names)}", code), lambda: subprocess.run(start, check=True)
    )
    figures.add("first Python call", 3, *first)
    await sandboxes.close()
    megabytes = await memory(options.sessions, call)
    figures.report.note(
        f"Memory of a session beside its interpreter: {megabytes:.1f} MB of {options.sessions} sessions; target 15 MB."
    )
    await sandboxes.close()


async def memory(sessions: int, call: Callable[[str, Call], Awaitable[None]]) -> float:
    """Megabytes of sessions that have run Python and a shell; shared pages count by their share."""
    host = psutil.Process()
    before = host.memory_full_info().pss
    for number in range(sessions):
        await call(f"m{number}", PythonCall("1"))
        await call(f"m{number}", ShellCall(["true"]))
    beside = 0
    for each in host.children(recursive=True):
        # The interpreter is the process that was started with the mode `python` and is no bubblewrap.
        if each.name() == "bwrap" or "python" not in each.cmdline():
            beside += each.memory_full_info().pss
    grown = host.memory_full_info().pss - before
    return float(beside + grown) / sessions / 1e6


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--full", action="store_true", help="the rounds that published figures need")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--pause", type=float, default=0.5)
    options = parser.parse_args()
    options.rounds = options.rounds or (50 if options.full else 15)
    report = Report("tools", "Calls of the tool host", vars(options))
    figures = Figures(report)
    with tempfile.TemporaryDirectory() as root:
        asyncio.run(measure(options, Path(root), figures))
    report.table("Medians in turn", ["call", "ms", "bare ms", "ratio", "target at most"], figures.rows)
    report.save(figures.rows)


if __name__ == "__main__":
    main()
