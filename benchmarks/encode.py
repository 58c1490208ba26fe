"""Texts a second over HTTP against the best direct loops and against other servers, same model, same run.

1. Direct loops (torch in several forms, sentence-transformers, OpenVINO) wait in processes of their own; the best
   form of torch, with texts tokenised and sorted beforehand, is the limit that Penstock is measured against.
2. In every round each contestant has one turn, in alternating order: a server is started, warmed, checked against
   the model's true embeddings, loaded by 64 clients x 1 text and 8 clients x 32 texts, then by one lone client.
3. Figures are medians over rounds; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.contest import (
    CHECKED_TEXTS,
    GROUPS,
    LONE,
    MANY,
    Found,
    Sample,
    Work,
    WrongAnswer,
    loop_turn,
    server_turn,
)
from benchmarks.corpus import PASSAGES, fingerprint, passages
from benchmarks.loops.parent import LoopFailed, LoopProcess
from benchmarks.options import add_threads, names, parser
from benchmarks.peers.environments import EnvironmentFailed
from benchmarks.peers.servers import COMMANDS, peer
from benchmarks.processes import ServerFailed
from benchmarks.report import Report, Row
from benchmarks.serving import MINILM, penstock

Turn = Callable[[int], list[Sample]]
ENGINES = ("torch", "sentence-transformers", "openvino")


@dataclass(frozen=True, slots=True)
class Plan:
    """The conditions of a run. `lone`: texts of the lone client; `threads`: torch threads of every contestant."""

    device: str
    threads: int
    rounds: int
    texts: int
    lone: int
    precisions: Sequence[str]
    engines: Sequence[str]
    peers: Sequence[str]


def _loop(loops: LoopProcess, work: Work) -> Turn:
    return lambda turn: loop_turn(loops, work, turn)


def _penstock(precision: str, plan: Plan, work: Work) -> Turn:
    settings: dict[str, str | int | float] = {
        "worker.torch_threads": plan.threads,
        "worker.precision": precision,
        "worker.device": plan.device,
    }

    def take(turn: int) -> list[Sample]:
        with penstock(MINILM, settings) as server:
            return server_turn(server, precision, work, turn)

    return take


def _peer(name: str, threads: int, work: Work) -> Turn:
    def take(turn: int) -> list[Sample]:
        with peer(name, threads) as server:
            return server_turn(server, "float32", work, turn)

    return take


def _race(report: Report, turns: dict[str, Turn], rounds: int) -> Found:
    """Let every contestant have its turn in every round; one that fails is named and left out from then on."""
    samples: list[Sample] = []
    for turn in range(rounds):
        for name in list(turns) if turn % 2 == 0 else list(reversed(turns)):
            try:
                found = turns[name](turn)
            except (ServerFailed, WrongAnswer, EnvironmentFailed, LoopFailed, OSError, TimeoutError) as error:
                report.note(f"{name} was left out: {type(error).__name__}: {error}")
                del turns[name]
                continue
            samples += found
            rates = ", ".join(f"{sample.texts_per_s:.1f}" for sample in found)
            report.say(f"round {turn + 1}/{rounds} {name}: {rates} texts/s")
    return Found(samples)


def _throughput(report: Report, found: Found, precision: str) -> None:
    """Rates of all contestants, each as a ratio to the best direct torch loop, and Penstock as a ratio to each."""
    best = found.best_loop("torch", precision, MANY)
    if best is None:
        return
    rows: list[Row] = []
    for name in found.contestants(precision, MANY):
        values = [found.median(name, precision, load, "texts_per_s") for load in (MANY, GROUPS)]
        ratios = [found.ratio(name, best, precision, load, MANY) for load in (MANY, GROUPS)]
        ours = [
            found.ratio("penstock", name, precision, MANY),
            found.ratio("penstock", name, precision, GROUPS, None if values[1] else MANY),
        ]
        rest = [
            found.median(name, precision, MANY, value)
            for value in ("p50_ms", "p99_ms", "cores", "memory_mib")
        ]
        failed = sum(s.failed for s in found.samples if s.contestant == name and s.precision == precision)
        rows.append([f"{name} (best)" if name == best else name, *values, *ratios, *ours, *rest, failed])
    headers = ["contestant", "texts/s 64x1", "8x32", "to best 64x1", "8x32", "penstock/this 64x1", "8x32"]
    report.table(
        f"Throughput, {precision}", [*headers, "p50 ms", "p99 ms", "cores", "PSS MiB", "failed"], rows
    )
    chosen = [
        n
        for n in found.contestants(precision, MANY)
        if ": " not in n or n == best or not n.startswith("torch")
    ]
    rates = {name: found.median(name, precision, MANY, "texts_per_s") or 0.0 for name in chosen}
    report.bars(f"64 clients x 1 text, {precision}", "texts/s", rates)


def _lone(report: Report, found: Found, precision: str) -> None:
    """Latency of one client beside the fastest in-process call (tokenise and forward) of the torch loop."""
    loops = [name for name in found.contestants(precision, LONE) if name.startswith("torch: ")]
    if not loops:
        return
    inside = min(loops, key=lambda name: found.median(name, precision, LONE, "p50_ms") or 0.0)
    floor = found.median(inside, precision, LONE, "p50_ms") or 0.0
    rows: list[Row] = []
    for name in [
        inside,
        *(name for name in found.contestants(precision, LONE) if not name.startswith("torch: ")),
    ]:
        p50 = found.median(name, precision, LONE, "p50_ms") or 0.0
        rows.append([name, p50, found.median(name, precision, LONE, "p99_ms"), p50 - floor, p50 / floor])
    report.table(
        f"One client, {precision}", ["contestant", "p50 ms", "p99 ms", "added p50 ms", "ratio"], rows
    )


def _turns(report: Report, stack: contextlib.ExitStack, plan: Plan, work: Work) -> dict[str, Turn]:
    """One turn for each contestant; loop processes live until `stack` is closed."""
    turns: dict[str, Turn] = {}
    for precision in plan.precisions:
        for engine in plan.engines:
            try:
                loops = LoopProcess(engine, work.texts, plan.threads, precision, plan.device)
            except (EnvironmentFailed, LoopFailed) as error:
                report.note(f"{engine} {precision} was left out: {error}")
                continue
            turns[f"{engine} {precision}"] = _loop(stack.enter_context(loops), work)
        turns[f"penstock {precision}"] = _penstock(precision, plan, work)
    if "float32" in plan.precisions:
        turns |= {name: _peer(name, plan.threads, work) for name in plan.peers}
    return turns


def run(plan: Plan) -> Report:
    """Run the contest and save its report."""
    texts = passages(plan.texts)
    settings = asdict(plan) | {"corpus": fingerprint(texts)}
    name = "encode" if plan.device == "cpu" else f"encode-{plan.device}"
    report = Report(name, "Encoding over HTTP against direct loops and other servers", settings)
    with LoopProcess("torch", texts[:CHECKED_TEXTS], plan.threads, "float32") as truth:
        work = Work(texts, plan.lone, truth.vectors(CHECKED_TEXTS))
    with contextlib.ExitStack() as stack:
        found = _race(report, _turns(report, stack, plan, work), plan.rounds)
    for precision in plan.precisions:
        _throughput(report, found, precision)
        _lone(report, found, precision)
    report.save([asdict(sample) for sample in found.samples])
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    add_threads(options)
    options.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="peers and OpenVINO run on cpu only"
    )
    options.add_argument("--rounds", type=int, help="default 1, or 5 with --full")
    options.add_argument(
        "--texts", type=int, help="default 256, or 1024 with --full; eight times as many on cuda"
    )
    options.add_argument("--precisions", type=names, default=["float32", "bfloat16"], metavar="A,B")
    options.add_argument("--engines", type=names, metavar="A,B", help=", ".join(ENGINES))
    options.add_argument("--peers", type=names, metavar="A,B", help=", ".join(COMMANDS))
    chosen = options.parse_args()
    on_cpu = chosen.device == "cpu"
    texts = min(PASSAGES, (1024 if chosen.full else 256) * (1 if on_cpu else 8))
    plan = Plan(
        device=chosen.device,
        threads=chosen.threads,
        rounds=chosen.rounds or (5 if chosen.full else 1),
        texts=chosen.texts or texts,
        lone=200 if chosen.full else 60,
        precisions=chosen.precisions,
        engines=(ENGINES if on_cpu else ENGINES[:2]) if chosen.engines is None else chosen.engines,
        peers=(list(COMMANDS) if on_cpu else []) if chosen.peers is None else chosen.peers,
    )
    run(plan)


if __name__ == "__main__":
    main()
