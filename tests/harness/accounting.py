"""What a run of tests has cost: servers that were started, and processor time by file.

1. `count_server` is called where a test starts an arbiter or a worker.
2. Each test process adds up the processor seconds of a file's tests: its own, and those of its children that have ended
   and were waited for. The load of the machine does not change processor seconds. The arbiter does not wait for the
   supervisor, so `count_apart` adds the supervisor and its workers before a server stops. Processes that were forked
   (`tests/harness/lives.py`) count with the process that forks, which `follow` names.
3. The processes of pytest-xdist hand both to the process that prints, which tells the servers at the end of each run,
   and with `--processor-times` the most expensive files.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOST_FILES = 40
"""Files in the table."""

_servers = 0
_followed: list[int] = []
_apart = 0.0
_seconds: Counter[str] = Counter()


def count_server() -> None:
    """A test has started a server, or a worker without one."""
    global _servers
    _servers += 1


def count_apart(pid: int | None) -> None:
    """A process whose end nobody waits for has taken so much until now, with its children."""
    global _apart
    if pid is not None:
        _apart += _seconds_of(pid)


def follow(pid: int) -> None:
    """A process of this one goes on to the end of the run; what its ended children took counts from test to test."""
    _followed.append(pid)


def _ticks_of(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))


def _seconds_of(pid: int) -> float:
    """Processor time of a process, of its ended children, and of its living children; 0 for a process that is gone."""
    try:
        ticks = _ticks_of(pid)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return ticks / _TICKS_PER_S + sum(_seconds_of(int(child)) for child in children)


def processor_seconds() -> float:
    """Processor time of this process, of its ended children, of `count_apart`, and of `follow`."""
    return sum(os.times()[:4]) + _apart + sum(map(_ticks_of, _followed)) / _TICKS_PER_S


def add(path: Path, seconds: float) -> None:
    """A test of a file has taken so much processor time."""
    _seconds[os.path.relpath(path)] += seconds


def report() -> dict[str, Any]:
    """What this process has counted, as plain values."""
    return {"servers": _servers, "seconds": dict(_seconds)}


def take(told: dict[str, Any]) -> None:
    """Add what another process has counted."""
    global _servers
    _servers += told["servers"]
    _seconds.update(told["seconds"])


def lines(table: bool) -> list[str]:
    """The end of a run: the servers, and with `table` the most expensive files."""
    if not table:
        return [f"{_servers} servers were started"]
    rows = [f"{seconds:8.1f} s  {file}" for file, seconds in _seconds.most_common(MOST_FILES)]
    return [*rows, f"{_servers} servers were started, {sum(_seconds.values()):.0f} s of processor time"]
