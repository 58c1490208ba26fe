"""Query-document pairs a second over HTTP against direct loops: 64 clients, each with one query and 20 documents.

The model is a cross-encoder of MiniLM-L6's size, made of its weights and a classification head drawn from a fixed seed:
the figures need a real amount of work, not real relevance. In every round each contestant has one turn, in alternating
order; all scores are checked against sentence-transformers first. Ratios are medians of the ratios within a round.

The queue's bound and the requests' deadline are raised for the server: the questions of all clients together are more
than a processor works off in the seconds that a caller is made to wait by default, and would partly be refused.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from benchmarks.connection import Connection
from benchmarks.corpus import fingerprint, passages
from benchmarks.load import closed_loop, post
from benchmarks.loops.parent import LoopProcess
from benchmarks.options import add_threads, parser
from benchmarks.peers.servers import MODEL_DIR
from benchmarks.processes import cpu_seconds
from benchmarks.report import Report, Row
from benchmarks.serving import penstock

CLIENTS, DOCUMENTS = 64, 20
MODEL = "bench/cross-encoder"
QUERY_WORDS, DOCUMENT_WORDS = 8, 60
CHECKED = 4
_WARM_REQUESTS = 8
_MOST_DIFFERENCE = 1e-4

Question = tuple[str, list[str]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn; latencies are of whole requests and only servers have them."""

    contestant: str
    round: int
    pairs_per_s: float
    cores: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    failed: int = 0


def questions(count: int) -> list[Question]:
    """Queries of a few words, each with documents that are the beginnings of passages."""
    texts = passages()
    return [
        (
            " ".join(texts[number].split()[:QUERY_WORDS]),
            [
                " ".join(texts[(number * DOCUMENTS + at) % len(texts)].split()[:DOCUMENT_WORDS])
                for at in range(DOCUMENTS)
            ],
        )
        for number in range(count)
    ]


@contextlib.contextmanager
def cross_encoder() -> Iterator[Path]:
    """Directory of the model, beside a catalog directory that lists it; gone on exit."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL_DIR, num_labels=1, dtype=torch.float32)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        directory, catalog = Path(place) / "model", Path(place) / "catalog"
        catalog.mkdir()
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(directory)
        source = {"kind": "directory", "path": str(directory)}
        entry = {"id": MODEL, "source": source, "adapter": "cross_encoder", "outputs": {"score": {}}}
        (catalog / "model.yaml").write_text(json.dumps(entry))
        yield directory


def compare(contestant: str, scores: Sequence[float], truth: Sequence[float]) -> None:
    """Raise ValueError unless all scores are the model's."""
    most = float(np.abs(np.subtract(scores, truth)).max())
    if not most <= _MOST_DIFFERENCE:
        raise ValueError(f"{contestant}: scores differ by {most:.1e}")


def server_turn(
    directory: Path, threads: int, asked: Sequence[Question], truth: Sequence[float], turn: int
) -> list[Sample]:
    """Start Penstock, warm it, check its scores, and load it from all clients at once."""
    settings: dict[str, str | int | float] = {
        "catalog.dirs": str(directory.parent / "catalog"),
        "worker.torch_threads": threads,
        "worker.precision": "float32",
        "queue.min_tokens": 1 << 22,
        "limits.request_timeout_s": 900,
    }
    bodies = [
        {"query": {"text": query}, "items": [{"text": document} for document in documents]}
        for query, documents in asked
    ]
    requests = [post(f"/v1/score/{MODEL}", body) for body in bodies]
    with penstock(MODEL, settings) as server:
        closed_loop(server.address, requests[-_WARM_REQUESTS:], _WARM_REQUESTS)
        with Connection(server.address) as connection:
            for number in range(CHECKED):
                found = json.loads(connection.fetch(requests[number])[1])["scores"]
                by_item = {entry["item_id"]: entry["score"] for entry in found}
                scores = [by_item[f"item-{at}"] for at in range(DOCUMENTS)]
                compare("penstock", scores, truth[number * DOCUMENTS : (number + 1) * DOCUMENTS])
        before = cpu_seconds(server.pids())
        result = closed_loop(server.address, requests, CLIENTS)
        cores = (cpu_seconds(server.pids()) - before) / result.wall_s
    pairs = result.rate_per_s * DOCUMENTS
    latency = result.latency_ms(50), result.latency_ms(99)
    return [Sample("penstock", turn, pairs, cores, *latency, result.failed)]


def loop_turn(loops: LoopProcess, count: int, turn: int) -> list[Sample]:
    """One pass of each loop of a process."""
    samples = []
    for name in loops.names:
        found = loops.run(name, count)
        rate, cores = count * DOCUMENTS / found["wall_s"], found["cpu_s"] / found["wall_s"]
        samples.append(Sample(f"{loops.engine}: {name}", turn, rate, cores))
    return samples


def show(report: Report, samples: Sequence[Sample]) -> None:
    """The table of all contestants, with ratios to the best loop over the adapter and of Penstock to each."""
    rates: dict[str, dict[int, float]] = {}
    for sample in samples:
        rates.setdefault(sample.contestant, {})[sample.round] = sample.pairs_per_s
    medians = {name: median(found.values()) for name, found in rates.items()}
    best = max((name for name in rates if name.startswith("adapter: ")), key=medians.__getitem__)

    def ratio(ours: str, theirs: str) -> float:
        return median(rates[ours][turn] / rates[theirs][turn] for turn in rates[ours])

    rows: list[Row] = []
    for name in rates:
        own = [sample for sample in samples if sample.contestant == name]
        p50, p99 = ([getattr(one, field) for one in own] for field in ("p50_ms", "p99_ms"))
        latency = [median(p50), median(p99)] if None not in p50 else [None, None]
        cores = median(sample.cores for sample in own)
        per_core = median(sample.pairs_per_s / sample.cores for sample in own)
        rest = [cores, per_core, *latency, sum(sample.failed for sample in own)]
        shown = f"{name} (best)" if name == best else name
        rows.append([shown, medians[name], ratio(name, best), ratio("penstock", name), *rest])
    ratios = ["pairs/s", "to best", "penstock/this", "cores", "pairs/core-s"]
    headers = ["contestant", *ratios, "p50 ms", "p99 ms", "failed"]
    report.table(f"{CLIENTS} clients x 1 query with {DOCUMENTS} documents, float32", headers, rows)
    report.bars(f"{CLIENTS} clients x 1 query with {DOCUMENTS} documents", "pairs/s", medians)


def run(threads: int, rounds: int, count: int) -> None:
    """Run the contest and save its report."""
    asked = questions(count)
    texts = tuple(text for query, documents in asked for text in (query, *documents))
    settings = {"threads": threads, "rounds": rounds, "requests": count, "corpus": fingerprint(texts)}
    report = Report("score", "Reranking over HTTP against direct loops", settings)
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(cross_encoder())
        loops = {
            engine: stack.enter_context(LoopProcess(engine, asked, threads, "float32", model_dir=directory))
            for engine in ("CrossEncoder", "adapter")
        }
        truth = np.ravel(loops["CrossEncoder"].vectors(CHECKED)).tolist()
        compare("adapter", np.ravel(loops["adapter"].vectors(CHECKED)).tolist(), truth)
        turns: dict[str, Callable[[int], list[Sample]]] = {
            "adapter": lambda turn: loop_turn(loops["adapter"], count, turn),
            "CrossEncoder": lambda turn: loop_turn(loops["CrossEncoder"], count, turn),
            "penstock": lambda turn: server_turn(directory, threads, asked, truth, turn),
        }
        for turn in range(rounds):
            for name in list(turns) if turn % 2 == 0 else list(reversed(turns)):
                found = turns[name](turn)
                samples += found
                shown = ", ".join(f"{sample.pairs_per_s:.1f}" for sample in found)
                report.say(f"round {turn + 1}/{rounds} {name}: {shown} pairs/s")
    show(report, samples)
    report.save([asdict(sample) for sample in samples])


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    add_threads(options)
    options.add_argument("--rounds", type=int, help="default 1, or 5 with --full")
    options.add_argument("--requests", type=int, help="default 64, or 256 with --full")
    chosen = options.parse_args()
    rounds = chosen.rounds or (5 if chosen.full else 1)
    run(chosen.threads, rounds, chosen.requests or (256 if chosen.full else 64))


if __name__ == "__main__":
    main()
