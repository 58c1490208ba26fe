"""Generated text without a model: what a token costs the worker and the frontends, over 300 streams.

1. Start Penstock with one worker, and one or four frontends. A fake engine says the next letter of all streams at once
   (`tests/fakes/talking.py`); scheduler, text, ZeroMQ, events and HTTP are real.
2. In every round, all streams run from their first to their last token. The clients read without parsing, seldom.
3. Processor time of the worker and of the frontends is read around each round. A worker or a frontend has one
   interpreter, so a token cannot be faster than its processor time there: the rates of the targets are also told as
   what one processor second of each side carries, which a busy machine hardly bends.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import llamas
from benchmarks.options import parser
from benchmarks.processes import Server, cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, frontend_pids, penstock, worker_pids
from benchmarks.streaming import chat, read

MODEL = "bench/talking"
STREAMS = 300
FRONTENDS = (1, 4)
TARGET_TOKENS_PER_S, TARGET_EVENTS_PER_S = 30_000, 10_000
_PAUSE_S = 0.05
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Sample:
    """One round; processor times are microseconds a token, of all processes of a side together."""

    frontends: int
    tokens: int
    wall_s: float
    worker_us: float
    frontend_us: float
    client_us: float


@contextlib.contextmanager
def talking_catalog() -> Iterator[Path]:
    """A catalog directory with the model that says letters; gone on exit."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        source = llamas.save("tiny", Path(place) / "model")
        catalog = Path(place) / "catalog"
        catalog.mkdir()
        entry = {
            "id": MODEL,
            "source": {"kind": "directory", "path": str(source)},
            "adapter": "tests.fakes.talking:TalkingAdapter",
            "outputs": {"chat": {}},
        }
        (catalog / "talking.yaml").write_text(json.dumps(entry))
        yield catalog


def check(server: Server) -> None:
    """Raise ValueError unless an answer is letters in turn, one event for each."""
    [stream] = read(server.address, [chat(MODEL, "hello", 52)], keep=True)
    answer = stream.answer
    if stream.tokens != 52 or len(answer) != 52 or answer not in _LETTERS * 4:
        raise ValueError(f"an answer of {stream.tokens} tokens reads {answer!r}")


def measure(server: Server, frontends: int, tokens: int) -> Sample:
    """All streams once."""
    sides = worker_pids(server), frontend_pids(server)
    before = [cpu_seconds(pids) for pids in sides]
    own, began = time.process_time(), time.perf_counter()
    streams = read(server.address, [chat(MODEL, "hello", tokens)] * STREAMS, pause_s=_PAUSE_S)
    wall_s = time.perf_counter() - began
    own_s = time.process_time() - own
    used = [cpu_seconds(pids) - earlier for pids, earlier in zip(sides, before, strict=True)]
    count = sum(stream.tokens for stream in streams)
    if count != STREAMS * tokens:
        raise ValueError(f"{count} tokens came of {STREAMS * tokens}")
    return Sample(frontends, count, wall_s, *(each / count * 1e6 for each in (*used, own_s)))


def run(rounds: int, tokens: int, counts: Sequence[int] = FRONTENDS) -> Report:
    """Measure and save the report."""
    report = Report(
        "transport",
        "Generated text without a model",
        {"rounds": rounds, "streams": STREAMS, "tokens a stream": tokens},
    )
    samples: list[Sample] = []
    with talking_catalog() as catalog:
        for frontends in counts:
            settings: Settings = {
                "catalog.dirs": str(catalog),
                "server.frontends": frontends,
                "worker.count": 1,
                "worker.torch_threads": 1,
                "generation.max_sequences": STREAMS,
                "generation.prefill_tokens": 4096,
            }
            with penstock(MODEL, settings) as server:
                check(server)
                measure(server, frontends, 32)
                for turn in range(rounds):
                    found = measure(server, frontends, tokens)
                    samples.append(found)
                    costs = f"{found.worker_us:.1f} and {found.frontend_us:.1f} us"
                    report.say(f"round {turn + 1}: {found.tokens / found.wall_s:,.0f} tokens/s, {costs}")
    show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def show(report: Report, samples: list[Sample]) -> None:
    """One row for each number of frontends, and the targets."""
    rows: list[Row] = []
    for frontends in dict.fromkeys(sample.frontends for sample in samples):
        chosen = [sample for sample in samples if sample.frontends == frontends]
        rate = median(sample.tokens / sample.wall_s for sample in chosen)
        worker, frontend, client = (
            median(getattr(sample, name) for sample in chosen)
            for name in ("worker_us", "frontend_us", "client_us")
        )
        rows.append([frontends, rate, worker, frontend, client, 1e6 / worker, frontends * 1e6 / frontend])
        if frontends == max(FRONTENDS):
            text = f"{STREAMS} streams, {frontends} frontends, tokens/s at least {TARGET_TOKENS_PER_S:,}"
            say_target(report, f"{text}, by the clock", rate, TARGET_TOKENS_PER_S)
            carried = min(1e6 / worker, frontends * 1e6 / frontend)
            say_target(report, f"{text}, by processor time", carried, TARGET_TOKENS_PER_S)
        if frontends == 1:
            text = f"events/s of one frontend at least {TARGET_EVENTS_PER_S:,}, by processor time"
            say_target(report, text, 1e6 / frontend, TARGET_EVENTS_PER_S)
    heads = ["frontends", "tokens/s", "worker us", "frontend us", "clients us"]
    heads += ["a worker-second", "a second of all frontends"]
    report.table(f"{STREAMS} streams, one event a token", heads, rows)


def say_target(report: Report, text: str, found: float, least: float) -> None:
    """Say whether a target is met."""
    report.note(f"Target: {text}: {found:,.0f}, {'met' if found >= least else 'missed'}.")


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("--frontends", type=int, nargs="*", default=FRONTENDS, help="default 1 and 4")
    chosen = options.parse_args()
    run(*((5, 600) if chosen.full else (3, 200)), chosen.frontends)


if __name__ == "__main__":
    main()
