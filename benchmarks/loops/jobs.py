"""A process that generates answers to prompts, as both of its ends see the process. Needs the standard library alone.

The parent writes one JSON line, `[[prompt, tokens], ...]`: token ids of each prompt, and the length of its answer. The
child generates all answers and writes `{"wall_s", "cpu_s", "answers"}` with the token ids, or null for a library that
gives no ids. Tokenising and text of prompts are no part of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import ROOT, ensure

PLAIN = "penstock, no step captured"
"""Penstock's engine without `generation.cuda_graphs`."""
MODULES = {
    "penstock": "torch_generators",
    PLAIN: "torch_generators",
    "continuous": "torch_generators",
    "static": "torch_generators",
    "mistralrs": "mistralrs_generator",
}
"""Modules of `benchmarks.loops` by contestant."""

Job = tuple[list[int], int]
Answers = list[list[int]] | None
Run = Callable[[Sequence[Job]], Answers]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one pass over some jobs took, and the answers."""

    wall_s: float
    cpu_s: float
    answers: Answers


class Generator:
    """The parent's end of one contestant."""

    def __init__(
        self, contestant: str, model_dir: Path, precision: str, threads: int, device: str = "cpu"
    ) -> None:
        self.contestant = contestant
        python = str(ensure(contestant)) if contestant == "mistralrs" else sys.executable
        settings = {
            "OMP_NUM_THREADS": threads,
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
        }
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "MISTRALRS_CPU_KV_F32": "1"}
        command = [python, "-m", f"benchmarks.loops.{MODULES[contestant]}"]
        self._process = subprocess.Popen(
            [*command, contestant, str(model_dir), precision, str(threads), device],
            cwd=ROOT,
            env=os.environ | quiet | {name: str(value) for name, value in settings.items()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, jobs: Sequence[Job]) -> Turn:
        """Generate the answers to all jobs at once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(jobs), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.contestant} ended with {self._process.wait()}")
        return Turn(**json.loads(line))


def serve(load: Callable[[], Run]) -> None:
    """The child's end: load, then answer jobs until standard input ends. Libraries write to standard error."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run = load()
    for line in sys.stdin:
        jobs = [(prompt, tokens) for prompt, tokens in json.loads(line)]
        wall, cpu = time.perf_counter(), time.process_time()
        answers = run(jobs)
        turn = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "answers": answers}
        print(json.dumps(turn), file=output)
    os._exit(0)
