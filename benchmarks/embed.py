"""Texts a second of `penstock embed`, from a file of texts to a file of vectors, against the best direct torch loop.

1. The texts of the corpus, each several times with a number before, are written to a file. A server runs all the time.
2. The forms of the direct loop (texts tokenised and sorted beforehand) run over some texts; the best form is taken.
3. In every round the command and the loop have one turn over all texts, in alternating order, with as many threads.
   A turn has its time by the clock, and the processor time of all processes: command, frontend, worker.
4. A run of the command over one text, in the same round, is the start-up of the command, which is shown apart.

A shared machine moves the clock. Processor time moves little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.contest import CHECKED_TEXTS, Work
from benchmarks.corpus import PASSAGES, fingerprint, passages
from benchmarks.loops.parent import LoopProcess
from benchmarks.options import add_threads, parser
from benchmarks.processes import Server, cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import MINILM, ROOT, frontend_pids, penstock, worker_pids

TARGET = 0.95
COMMAND, LOOP = "penstock embed", "direct loop"
_TRIED_TEXTS = 96
"""Texts that choose the form of the loop."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn over all texts: seconds by the clock, and processor seconds of the parts (those of the loop: `worker`).

    `start_s` and `start_cpu_s` are those of the same command over one text; 0 for the loop.
    """

    contestant: str
    round: int
    wall_s: float
    worker_s: float
    frontend_s: float = 0.0
    command_s: float = 0.0
    start_s: float = 0.0
    start_cpu_s: float = 0.0

    @property
    def steady_s(self) -> float:
        """Seconds without the start-up of the command."""
        return self.wall_s - self.start_s

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all processes without the start-up of the command."""
        return self.worker_s + self.frontend_s + self.command_s - self.start_cpu_s


def texts_of(count: int) -> tuple[str, ...]:
    """`count` texts of the corpus, none of them twice."""
    again = -(-count // PASSAGES)
    numbered = [
        f"{turn} {text}" if turn else text for turn in range(again) for text in passages(min(count, PASSAGES))
    ]
    return tuple(numbered[:count])


def _written(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _run_command(server: Server, source: Path, output: Path) -> tuple[float, float]:
    """Seconds and processor seconds of one run of the command."""
    host, port = server.address
    command = [sys.executable, "-m", "penstock", "embed", str(source), str(output), "--force"]
    since = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--model", MINILM, "--url", f"http://{host}:{port}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    told = process.stderr.read().decode(errors="replace")
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - since
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"penstock embed ended with {process.returncode}: {told[-1000:]}")
    return wall_s, used.ru_utime + used.ru_stime


def command_turn(server: Server, place: Path, work: Work, turn: int) -> Sample:
    """The command over one text, then over all texts; the vectors are checked."""
    start_s, start_cpu_s = _run_command(server, place / "one.jsonl", place / "one.npy")
    worker, frontend = worker_pids(server), frontend_pids(server)
    before = cpu_seconds(worker), cpu_seconds(frontend)
    wall_s, command_s = _run_command(server, place / "all.jsonl", place / "all.npy")
    vectors = np.load(place / "all.npy")
    if vectors.shape[0] != len(work.texts) or not np.isfinite(vectors).all():
        raise RuntimeError(f"penstock embed wrote {vectors.shape}, or rows that are not finite")
    work.compare(COMMAND, "float32", vectors[:CHECKED_TEXTS].tolist())
    spent = cpu_seconds(worker) - before[0], cpu_seconds(frontend) - before[1]
    return Sample(COMMAND, turn, wall_s, *spent, command_s, start_s, start_cpu_s)


def loop_turn(loops: LoopProcess, form: str, count: int, turn: int) -> Sample:
    """One pass of the loop."""
    found = loops.run(form, count)
    return Sample(LOOP, turn, found["wall_s"], found["cpu_s"])


def best_form(report: Report, loops: LoopProcess) -> str:
    """The form of the loop that takes the least processor time, each warmed before."""
    costs = {}
    for name in loops.names:
        loops.run(name, CHECKED_TEXTS)
        costs[name] = loops.run(name, _TRIED_TEXTS)["cpu_s"]
        report.say(f"loop, {name}: {_TRIED_TEXTS / costs[name]:.1f} texts a processor second")
    return min(costs, key=costs.__getitem__)


def show(report: Report, samples: Sequence[Sample], count: int) -> None:
    """The tables, and whether the target is met."""
    by_name = {name: [one for one in samples if one.contestant == name] for name in (LOOP, COMMAND)}
    pairs = list(zip(by_name[COMMAND], by_name[LOOP], strict=True))
    clock = median(theirs.steady_s / ours.steady_s for ours, theirs in pairs)
    processor = median(theirs.cpu_s / ours.cpu_s for ours, theirs in pairs)
    rows: list[Row] = []
    for name, own in by_name.items():
        ratios = (clock, processor) if name == COMMAND else (1.0, 1.0)
        rates = [median(count / getattr(one, field) for one in own) for field in ("steady_s", "cpu_s")]
        rows.append([name, rates[0], ratios[0], rates[1], ratios[1]])
    headers = ["contestant", "texts/s", "to the loop", "texts/core-s", "to the loop"]
    report.table(f"{count} texts, without the start-up of the command", headers, rows)
    parts = {
        "worker": "worker_s",
        "frontend": "frontend_s",
        "command, start-up included": "command_s",
        "start-up of the command": "start_cpu_s",
        "start-up of the command, by the clock": "start_s",
    }
    ours = by_name[COMMAND]
    report.table(
        "Where the command's time goes",
        ["part", "seconds", "ms a text"],
        [
            [part, seconds := median(getattr(one, field) for one in ours), seconds / count * 1e3]
            for part, field in parts.items()
        ],
    )
    for what, ratio in {"processor time": processor, "the clock": clock}.items():
        met = "met" if ratio >= TARGET else "missed"
        report.note(f"Target: at least {TARGET:g} of the direct loop, by {what}: {ratio:.3f}, {met}.")


def run(threads: int, rounds: int, count: int, form: str | None) -> Report:
    """Measure and save the report."""
    texts = texts_of(count)
    settings = {"threads": threads, "rounds": rounds, "texts": count, "corpus": fingerprint(texts)}
    report = Report("embed", "A file of texts through `penstock embed` against the direct loop", settings)
    samples: list[Sample] = []
    server_settings = {"worker.torch_threads": threads, "worker.precision": "float32", "worker.count": 1}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory,
        LoopProcess("torch", texts, threads, "float32") as loops,
        penstock(MINILM, server_settings) as server,
    ):
        place = Path(directory)
        _written(place / "one.jsonl", texts[:1])
        _written(place / "all.jsonl", texts)
        work = Work(texts, 0, loops.vectors(CHECKED_TEXTS))
        chosen = form or best_form(report, loops)
        report.note(f"Form of the direct loop: {chosen}.")
        turns = {
            LOOP: lambda turn: loop_turn(loops, chosen, count, turn),
            COMMAND: lambda turn: command_turn(server, place, work, turn),
        }
        for turn in range(rounds):
            for name in list(turns) if turn % 2 == 0 else list(reversed(turns)):
                found = turns[name](turn)
                samples.append(found)
                rates = f"{count / found.steady_s:.1f} texts/s, {count / found.cpu_s:.1f} a processor second"
                report.say(f"round {turn + 1}/{rounds} {name}: {rates}")
    show(report, samples, count)
    report.save([asdict(sample) for sample in samples])
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    add_threads(options)
    options.add_argument("--rounds", type=int, help="default 2, or 3 with --full")
    options.add_argument("--texts", type=int, help="default 500, or 10000 with --full")
    options.add_argument("--form", help="form of the direct loop (default: the best of a trial)")
    chosen = options.parse_args()
    rounds = chosen.rounds or (3 if chosen.full else 2)
    run(chosen.threads, rounds, chosen.texts or (10_000 if chosen.full else 500), chosen.form)


if __name__ == "__main__":
    main()
