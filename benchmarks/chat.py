"""Tokens of chat over HTTP for a processor second of the whole server, against `transformers serve`.

1. Serve a Llama with random weights with one torch thread: Penstock with one frontend and one worker, and
   `transformers serve --continuous-batching`. Both run all the time, and wait without work while the other is loaded.
2. In every round each server gets 1, 8 and 32 greedy streams in turn, with new prompts of 64 tokens and answers of 64.
3. A lone client's time to the first text is compared with that of the same engine in this process, which gets a
   prompt of as many tokens in turn with the server.

The clients read without parsing (`benchmarks.streaming`). Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.chat_models import CONTEXT, generator, letters
from benchmarks.options import parser
from benchmarks.peers.chat import serve
from benchmarks.processes import Server, cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, penstock
from benchmarks.streaming import chat, read
from ipc.wire.messages import Ending, GenerateCall, Sampling
from workers.adapters.base import LoadContext, Prepared
from workers.adapters.causal import CausalAdapter

MODEL = "bench/llama"
STREAMS = (1, 8, 32)
PROMPT, ANSWER = 64, 64
LEAST = {"tiny": 2.5, "30M": 1.5}
"""Tokens for a processor second against the peer's at 32 streams."""
MOST_FIRST_MS = 5.0
_LONE = 20
_OURS, _THEIRS = "penstock", "transformers serve"


@dataclass(frozen=True, slots=True)
class Sample:
    """One load of one server; `first_ms` is the median time to the first text."""

    size: str
    contestant: str
    streams: int
    round: int
    tokens_per_s: float
    us_per_token: float
    first_ms: float


@dataclass(frozen=True, slots=True)
class Lone:
    """First texts of a lone client, and of the engine alone, in turn; milliseconds."""

    size: str
    server_ms: list[float]
    engine_ms: list[float]

    @property
    def more_ms(self) -> float:
        """Median of the differences."""
        return median(server - engine for server, engine in zip(self.server_ms, self.engine_ms, strict=True))


class InProcess:
    """The engine of a model in this process."""

    def __init__(self, weights: Path) -> None:
        torch.set_num_threads(1)
        context = LoadContext(
            weights,
            MODEL,
            torch.device("cpu"),
            torch.float32,
            CONTEXT,
            {},
            lambda phase, part: None,
            free_bytes=lambda: 1 << 32,
        )
        self._adapter = CausalAdapter.load(context)
        self._count = 0

    def first_ms(self, text: str) -> float:
        """Milliseconds from a text to its first token."""
        call = GenerateCall(text=text, ending=Ending(max_tokens=2), sampling=Sampling(temperature=0.0))
        self._count += 1
        began = time.perf_counter()
        [prepared] = self._adapter.prepare([], call)
        assert isinstance(prepared, Prepared)
        request = prepared.payload
        request.key = self._count
        engine = self._adapter.engine
        engine.add(request)
        engine.step()
        took = time.perf_counter() - began
        while engine.has_work:
            engine.step()
        return took * 1e3


def load(size: str, server: Server, model: str, streams: int, turn: int) -> Sample:
    """All streams of a round."""
    asked = [chat(model, letters(PROMPT, f"{turn} {streams} {number}"), ANSWER) for number in range(streams)]
    pids = server.pids()
    before, began = cpu_seconds(pids), time.perf_counter()
    found = read(server.address, asked)
    wall_s, used = time.perf_counter() - began, cpu_seconds(pids) - before
    tokens = sum(stream.tokens for stream in found)
    if tokens != streams * ANSWER:
        raise ValueError(f"{server.name}: {tokens} tokens of {streams * ANSWER}")
    first_ms = median(stream.first_s for stream in found) * 1e3
    name = _OURS if model == MODEL else _THEIRS
    return Sample(size, name, streams, turn, tokens / wall_s, used / tokens * 1e6, first_ms)


def lone(size: str, server: Server, engine: InProcess) -> Lone:
    """A lone client and the engine alone, in turn."""
    ours, alone = [], []
    for number in range(_LONE):
        [stream] = read(server.address, [chat(MODEL, letters(PROMPT, f"lone {number}"), 2)])
        ours.append(stream.first_s * 1e3)
        alone.append(engine.first_ms(letters(PROMPT, f"lone {number}")))
    return Lone(size, ours, alone)


def measure(size: str, rounds: int, repeats: int, report: Report) -> tuple[list[Sample], Lone]:
    """All loads of one size. A load of few streams is `repeats` times as long by repetition."""
    settings: Settings = {"server.frontends": 1, "worker.count": 1, "worker.torch_threads": 1}
    samples: list[Sample] = []
    with ExitStack() as stack:
        weights, catalog = stack.enter_context(generator(MODEL, size))
        more = {"worker.precision": "float32", "catalog.dirs": str(catalog)}
        ours = stack.enter_context(penstock(MODEL, {**settings, **more}))
        theirs = stack.enter_context(serve(weights, threads=1))
        turns: list[Callable[[int, int], Sample]] = [
            lambda streams, turn: load(size, ours, MODEL, streams, turn),
            lambda streams, turn: load(size, theirs, str(weights), streams, turn),
        ]
        for contestant in turns:
            contestant(8, -1)
        for turn in range(rounds):
            for streams in STREAMS:
                for again in range(repeats if streams < max(STREAMS) else 1):
                    order = turns if (turn + again) % 2 == 0 else turns[::-1]
                    samples += [contestant(streams, turn * repeats + again) for contestant in order]
            report.say(f"{size}: round {turn + 1}/{rounds}")
        engine = InProcess(weights)
        lone(size, ours, engine)
        return samples, lone(size, ours, engine)


def ratio(samples: list[Sample], size: str, streams: int) -> float:
    """Their processor time a token by ours, median over rounds."""
    chosen = [one for one in samples if (one.size, one.streams) == (size, streams)]
    costs = {(one.contestant, one.round): one.us_per_token for one in chosen}
    turns = sorted({one.round for one in chosen})
    return median(costs[_THEIRS, turn] / costs[_OURS, turn] for turn in turns)


def show(report: Report, samples: list[Sample], first: list[Lone]) -> None:
    """A table for each size, and the targets."""
    for found in first:
        rows: list[Row] = []
        for streams in STREAMS:
            for name in (_OURS, _THEIRS):
                fields = ("tokens_per_s", "us_per_token", "first_ms")
                chosen = [
                    one
                    for one in samples
                    if (one.size, one.streams, one.contestant) == (found.size, streams, name)
                ]
                values = [median(getattr(one, field) for one in chosen) for field in fields]
                rows.append([f"{streams}: {name}", *values, ratio(samples, found.size, streams)])
        heads = ["streams: server", "tokens/s", "cpu us/token", "first text ms", "their cpu to ours"]
        report.table(f"{found.size}, float32, {PROMPT} + {ANSWER} tokens", heads, rows)
        at_most = max(STREAMS)
        value = ratio(samples, found.size, at_most)
        text = f"{found.size}, {at_most} streams: at least {LEAST[found.size]:g} times their tokens a processor second"
        report.note(f"Target: {text}: {value:.2f}, {'met' if value >= LEAST[found.size] else 'missed'}.")
        text = f"{found.size}: first text at one client at most {MOST_FIRST_MS:g} ms above the engine alone"
        times = f"{median(found.server_ms):.1f} ms against {median(found.engine_ms):.1f}"
        met = "met" if found.more_ms <= MOST_FIRST_MS else "missed"
        report.note(f"Target: {text}: {found.more_ms:.1f} ({times}), {met}.")


def run(rounds: int, sizes: list[str]) -> Report:
    """Measure and save the report."""
    report = Report("chat", "Chat over HTTP against transformers serve", {"rounds": rounds, "threads": 1})
    samples: list[Sample] = []
    first: list[Lone] = []
    for size in sizes:
        found, alone = measure(size, rounds, 4 if size == "tiny" else 1, report)
        samples += found
        first.append(alone)
    show(report, samples, first)
    report.save({"samples": [asdict(one) for one in samples], "lone": [asdict(one) for one in first]})
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    options.add_argument("sizes", nargs="*", default=list(LEAST), metavar="SIZE", help=" ".join(LEAST))
    chosen = options.parse_args()
    run(9 if chosen.full else 3, chosen.sizes)


if __name__ == "__main__":
    main()
