"""Processor time of the generation engine a token, against other ways to generate with the same model.

1. Build a tiny and a 30 M Llama with random weights, on CUDA a Llama of 1 B. Every contestant is a process of its own
   with one torch thread.
2. In every round, give all contestants the same new prompts, in turn. The answers are greedy, of a given length.
3. Compare processor time within each round (on CUDA time by the clock), and the tokens of the answers with those of
   generate().

Contestants: Penstock's engine with sampling stage, prefix cache and text; transformers' continuous batching; static
batches of generate(); the `mistralrs` package. No server takes part.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import transformers

from benchmarks import llamas
from benchmarks.loops.jobs import PLAIN, Generator, Job
from benchmarks.options import parser
from benchmarks.report import Report

EVEN = (1, 8, 32)
"""Streams in lockstep, each with a prompt of 64 tokens and an answer of 64."""
UNEVEN, LONG = "uneven", "long prompts"


@dataclass(frozen=True, slots=True)
class Target:
    """The least ratio of a contestant's processor time to the engine's, for each load."""

    contestant: str
    least: dict[int | str, float]


@dataclass(frozen=True, slots=True)
class Setup:
    """A model at a precision, the contestants beside the engine, its loads and targets."""

    size: str
    precision: str
    contestants: tuple[str, ...]
    loads: tuple[int | str, ...]
    targets: tuple[Target, ...]
    repeats: int = 1
    """How many times as many rounds as of the longest setup."""
    device: str = "cpu"

    @property
    def name(self) -> str:
        """What the report calls the setup."""
        return f"{self.size}, {self.precision}"

    @property
    def compared(self) -> str:
        """The field of `Sample` that the targets compare."""
        return "cpu_s" if self.device == "cpu" else "wall_s"


_STATIC = Target("static", dict.fromkeys(EVEN, 0.8) | {UNEVEN: 1.4})
SETUPS = (
    Setup(
        "tiny",
        "float32",
        ("continuous", "static"),
        (*EVEN, UNEVEN, LONG),
        (Target("continuous", {1: 1.3, 8: 1.5, 32: 1.9, UNEVEN: 1.4, LONG: 2.5}), _STATIC),
        repeats=4,
    ),
    Setup(
        "30M",
        "float32",
        ("continuous", "static", "mistralrs"),
        (*EVEN, UNEVEN),
        (
            Target("continuous", {1: 0.95, 8: 1.15, 32: 1.5, UNEVEN: 1.4}),
            _STATIC,
            Target("mistralrs", {32: 1.5}),
        ),
    ),
    Setup(
        "30M",
        "bfloat16",
        ("continuous", "static"),
        EVEN,
        (Target("continuous", {1: 1.3, 8: 1.5, 32: 1.6}), _STATIC),
    ),
    Setup(
        "1B",
        "bfloat16",
        (PLAIN, "continuous", "static"),
        (*EVEN, UNEVEN),
        (Target("continuous", {1: 1.3, 8: 1.5, 32: 1.6, UNEVEN: 1.4}), _STATIC),
        device="cuda",
    ),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One contestant's turn with one load; `equal` is the share of answers with the tokens of generate()."""

    setup: str
    load: int | str
    contestant: str
    round: int
    tokens: int
    wall_s: float
    cpu_s: float
    equal: float | None


def jobs_of(load: int | str, size: str, seed: int) -> list[Job]:
    """New prompts of capital letters, each of which is one token, with the lengths of their answers."""
    draw = random.Random(f"{load} {size} {seed}")
    if load == UNEVEN:
        lengths = [
            (draw.randint(16, 192), draw.randint(16, 96)) for _ in range(128 if size == "tiny" else 48)
        ]
    elif load == LONG:
        lengths = [(draw.randint(400, 600), draw.randint(16, 64)) for _ in range(32)]
    else:
        lengths = [(64, 64)] * int(load)
    letters = _letters()
    return [([draw.choice(letters) for _ in range(prompt)], answer) for prompt, answer in lengths]


def _letters() -> list[int]:
    tokenizer = llamas.tokenizer()
    return [int(tokenizer.convert_tokens_to_ids(letter)) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]


class Contest:
    """All contestants of one setup, and the samples of their turns."""

    def __init__(self, setup: Setup, directory: Path, report: Report) -> None:
        self._setup, self._directory, self._report = setup, directory, report
        self.samples: list[Sample] = []

    def run(self, rounds: int) -> None:
        """All loads, `rounds` times each; a contestant that fails is left out and named."""
        setup = self._setup
        with ExitStack() as stack:
            generators = []
            for contestant in ("penstock", *setup.contestants):
                try:
                    one = stack.enter_context(
                        Generator(contestant, self._directory, setup.precision, 1, setup.device)
                    )
                    one.run(jobs_of(2, setup.size, -1))
                    generators.append(one)
                except (RuntimeError, OSError) as error:
                    self._report.note(f"{setup.name}: {contestant} is left out: {error}")
            for load in setup.loads:
                for number in range(rounds):
                    self._round(generators, load, number)
                self._report.say(f"{setup.name}, {load}")

    def _round(self, generators: Sequence[Generator], load: int | str, number: int) -> None:
        jobs = jobs_of(load, self._setup.size, number)
        shift = number % len(generators)
        turns = {one.contestant: one.run(jobs) for one in (*generators[shift:], *generators[:shift])}
        truth = turns["static"].answers or []
        tokens = sum(length for _, length in jobs)
        for contestant, turn in turns.items():
            equal = None
            if turn.answers is not None:
                equal = sum(one == other for one, other in zip(turn.answers, truth, strict=True)) / len(jobs)
            name = self._setup.name
            self.samples.append(
                Sample(name, load, contestant, number, tokens, turn.wall_s, turn.cpu_s, equal)
            )


def ratio(samples: Sequence[Sample], load: int | str, contestant: str, field: str) -> float | None:
    """Median over rounds of a contestant's time divided by the engine's; None without samples."""
    times: dict[str, list[float]] = {
        name: [getattr(one, field) for one in samples if (one.load, one.contestant) == (load, name)]
        for name in (contestant, "penstock")
    }
    if not times[contestant]:
        return None
    return median(other / ours for other, ours in zip(times[contestant], times["penstock"], strict=True))


def tabulate(report: Report, setup: Setup, samples: Sequence[Sample]) -> None:
    """A table of one setup and a note for each target."""
    rows = []
    for load in setup.loads:
        for contestant in ("penstock", *setup.contestants):
            mine = [one for one in samples if (one.load, one.contestant) == (load, contestant)]
            if not mine:
                continue
            shares = [one.equal for one in mine if one.equal is not None]
            rows.append(
                (
                    f"{load}: {contestant}",
                    median(one.tokens / one.wall_s for one in mine),
                    median(one.cpu_s / one.tokens for one in mine) * 1e3,
                    ratio(samples, load, contestant, "cpu_s"),
                    ratio(samples, load, contestant, "wall_s"),
                    sum(shares) / len(shares) if shares else None,
                )
            )
    headers = (
        "streams: contestant",
        "tokens/s",
        "cpu ms/token",
        "cpu to ours",
        "wall to ours",
        "as generate()",
    )
    report.table(setup.name, headers, rows)
    for target in setup.targets:
        for load, least in target.least.items():
            found = ratio(samples, load, target.contestant, setup.compared)
            if load in setup.loads and found is not None:
                verdict = "met" if found >= least else "missed"
                time = "processor time" if setup.compared == "cpu_s" else "time by the clock"
                what = f"{setup.name}, {load}: {target.contestant} at least {least:g} times our {time}"
                report.note(f"Target: {what}: {found:.2f}, {verdict}.")


def run(rounds: int, only: Sequence[str], device: str) -> Report:
    """Measure and save the report."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = {"threads": 1, "rounds": rounds, "prompt and answer": "64 + 64 tokens"}
    name, title = "generation", "Generated tokens by processor time"
    if device != "cpu":
        name, title = f"{name}-{device}", f"Generated tokens on {device}"
    report = Report(name, title, settings)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        for setup in SETUPS:
            if setup.device != device or (only and setup.name not in only):
                continue
            directory = Path(place) / setup.size
            if not directory.exists():
                llamas.save(setup.size, directory, device)
            contest = Contest(setup, directory, report)
            contest.run(rounds * setup.repeats)
            tabulate(report, setup, contest.samples)
            samples += contest.samples
    report.save([asdict(one) for one in samples])
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument(
        "setups", nargs="*", metavar="SETUP", help=", ".join(repr(one.name) for one in SETUPS)
    )
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--rounds", type=int, help="default 3, or 9 with --full")
    chosen = options.parse_args()
    run(chosen.rounds or (9 if chosen.full else 3), chosen.setups, chosen.device)


if __name__ == "__main__":
    main()
