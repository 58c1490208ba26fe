"""Small requests to two trees of Penstock at the same time: what a change of the code costs or saves.

1. A server of each tree starts, with one frontend, one worker and the programs of `benchmarks.tensors`. Each tree runs
   in its own environment, `.venv` of the tree.
2. Each route is loaded in turns: this tree, the other tree, the other tree, this tree and so on. Two loads that follow
   each other make a pair, whose ratio of processor times a busy machine hardly bends.
3. The server that starts first measures about 2 % cheaper, so all is done twice, and the other tree starts first the
   second time. The result is the geometric mean of the two medians.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.load import Address
from benchmarks.options import names, parser
from benchmarks.processes import cpu_seconds, free_port
from benchmarks.report import Report, Row
from benchmarks.serving import ROOT
from benchmarks.tensors import ROUTES, load
from benchmarks.wrk import TOOL

_SERVE = """
import json, sys
from benchmarks.serving import frontend_pids, worker_pids
from benchmarks.tensor_requests import tensor_server
with tensor_server(["add_sub"], grpc__enabled="true", grpc__bind=sys.argv[1]) as server:
    print(json.dumps([server.address, frontend_pids(server), worker_pids(server)]), flush=True)
    sys.stdin.read()
"""
"""Serves until the standard input ends. Both trees have these names since their first benchmarks of tensors."""


@dataclass(frozen=True, slots=True)
class _Tree:
    """The server of one tree: its addresses for HTTP and gRPC, and the processes by kind."""

    address: Address
    grpc_address: str
    pids: dict[str, list[int]]

    def cost_us(self, route: str, connections: int, seconds: int) -> dict[str, float]:
        """Processor time a request by kind of process, in microseconds."""
        before = {kind: cpu_seconds(pids) for kind, pids in self.pids.items()}
        rate = load(self.address, self.grpc_address, route, connections, seconds)
        if rate.failed or not rate.requests:
            raise RuntimeError(f"{route}: {rate.failed} requests failed, {rate.requests} were answered")
        return {
            kind: (cpu_seconds(pids) - before[kind]) / rate.requests * 1e6 for kind, pids in self.pids.items()
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """Two loads that follow each other; `first` is the tree whose server started first."""

    route: str
    connections: int
    kind: str
    first: str
    this_us: float
    other_us: float


@contextlib.contextmanager
def _serving(tree: Path) -> Iterator[_Tree]:
    grpc_address = f"127.0.0.1:{free_port()}"
    command = [str(tree / ".venv" / "bin" / "python"), "-c", _SERVE, grpc_address]
    with subprocess.Popen(
        command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        if server.stdin is None or server.stdout is None:
            raise RuntimeError("the server has no pipes")
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of {tree} did not start")
        (host, port), frontends, workers = json.loads(line)
        try:
            yield _Tree((host, port), grpc_address, {"frontend": frontends, "worker": workers})
        finally:
            server.stdin.close()


def _pairs(
    report: Report,
    trees: dict[str, Path],
    routes: list[str],
    connections: list[int],
    turns: int,
    seconds: int,
) -> list[Pair]:
    """The pairs of one start of both servers, in the order of `trees`."""
    pairs: list[Pair] = []
    first = next(iter(trees))
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(_serving(path)) for name, path in trees.items()}
        for route in routes:
            for server in servers.values():
                load(server.address, server.grpc_address, route, max(connections), 1)
            for count in connections:
                for turn in range(turns):
                    order = ("this", "other") if turn % 2 == 0 else ("other", "this")
                    cost_us = {name: servers[name].cost_us(route, count, seconds) for name in order}
                    pairs += [
                        Pair(route, count, kind, first, cost_us["this"][kind], cost_us["other"][kind])
                        for kind in cost_us["this"]
                    ]
            report.say(f"{first} tree first: {route}")
    return pairs


def _ratio(pairs: list[Pair]) -> float | None:
    """This tree by the other; None for a process that did nothing."""
    if not all(pair.other_us for pair in pairs):
        return None
    by_first = [
        median(pair.this_us / pair.other_us for pair in pairs if pair.first == first)
        for first in ("this", "other")
    ]
    return math.sqrt(math.prod(by_first))


def _show(report: Report, pairs: list[Pair]) -> None:
    rows: list[Row] = []
    for route, count in dict.fromkeys((pair.route, pair.connections) for pair in pairs):
        row: list[str | float | None] = [f"{route}, {count}"]
        for kind in ("frontend", "worker"):
            chosen = [p for p in pairs if (p.route, p.connections, p.kind) == (route, count, kind)]
            row += [median(p.this_us for p in chosen), median(p.other_us for p in chosen), _ratio(chosen)]
        rows.append(row)
    headers = ["route, connections"]
    for kind in ("frontend", "worker"):
        headers += [f"{kind} us", f"other {kind} us", f"{kind} ratio"]
    report.table("Processor time of a request: this tree by the other tree", headers, rows)


def run(other: Path, routes: list[str], connections: list[int], turns: int, seconds: int) -> Report:
    """Measure and save the report."""
    conditions = {"turns": turns, "seconds": seconds, "tool": TOOL}
    report = Report("beside", "Small requests to two trees", conditions)
    trees = {"this": ROOT, "other": other}
    pairs = _pairs(report, trees, routes, connections, turns, seconds)
    pairs += _pairs(report, dict(reversed(trees.items())), routes, connections, turns, seconds)
    _show(report, pairs)
    report.save([asdict(pair) for pair in pairs])
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("tree", type=Path, help="another checkout, with its environment in .venv")
    options.add_argument("--routes", default=",".join(ROUTES), help="routes of benchmarks.tensors")
    options.add_argument("--connections", default="1,16")
    chosen = options.parse_args()
    connections = [int(count) for count in names(chosen.connections)]
    turns, seconds = (12, 5) if chosen.full else (6, 3)
    run(chosen.tree.resolve(), names(chosen.routes), connections, turns, seconds)


if __name__ == "__main__":
    main()
