"""Latency of a few queries beside other load on the same device: of another model, or a bulk job of their own model.

1. Serve all-MiniLM-L6-v2 and a tiny model of its kind in one worker.
2. In every round, send queries at random instants at a fifth of what a lone client could send; first alone, then while
   other clients keep the device busy in each of the ways of `FLOODS`, from a process of their own. Those of the first
   second are not counted: the first query meets batches that were formed when nobody else was there.
3. Batches of the load are timed once while no query has been sent for so long that they are full, and once beside the
   queries: the device is always busy then, so they share the time.

Latency counts from the instant a query was due. Ratios and differences are taken within a round, then their median.
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

import torch
import transformers

from benchmarks.connection import one_by_one
from benchmarks.corpus import fingerprint, passages
from benchmarks.flood import batches, flooded
from benchmarks.load import Address, closed_loop, open_loop, post
from benchmarks.options import add_threads, parser
from benchmarks.peers.servers import MODEL_DIR
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, penstock

SMALL, TINY = "bench/small", "bench/tiny"
MOST_RATIO = 2.0
_SHARE, _LEAD_S = 0.2, 1.0
_FORGET_S = 6.0
_WARM, _LONE = 64, 60
_BULK_TEXTS, _BULK_CLIENTS, _QUERY_CLIENTS = 192, 2, 32


@dataclass(frozen=True, slots=True)
class Flood:
    """The other load: requests for `model` of `texts` texts each from `clients` clients."""

    name: str
    model: str
    texts: int
    clients: int

    def requests(self) -> list[bytes]:
        """All passages once, in requests of this flood's size."""
        found = passages()
        return [request(self.model, found[at : at + self.texts]) for at in range(0, len(found), self.texts)]


def bulk_of(model: str) -> Flood:
    """A bulk job: few clients, hundreds of texts a request."""
    return Flood("bulk job", model, _BULK_TEXTS, _BULK_CLIENTS)


def queries_of(model: str) -> Flood:
    """Many clients with one text a request."""
    return Flood("queries", model, 1, _QUERY_CLIENTS)


FLOODS = {
    SMALL: (bulk_of(TINY), queries_of(TINY), bulk_of(SMALL)),
    TINY: (bulk_of(SMALL), queries_of(SMALL), bulk_of(TINY)),
}
"""The other load, by the model of the queries."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The queries of one round; `beside` is empty for queries alone. A batch's time is measured without queries."""

    quiet: str
    beside: str
    same_model: bool
    round: int
    p50_ms: float
    p99_ms: float
    failed: int
    flood_tokens_per_s: float = 0.0
    undisturbed_tokens_per_s: float = 0.0
    batch_ms: float = 0.0
    batch_ms_beside: float = 0.0


def request(model: str, texts: Sequence[str]) -> bytes:
    """A whole encode request."""
    items = [{"text": text} for text in texts]
    return post(f"/v1/encode/{model}", {"items": items}, accept="application/msgpack")


@contextlib.contextmanager
def catalog() -> Iterator[Path]:
    """A catalog directory with both models; the tiny one has random weights. Gone on exit."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as place:
        directory, tiny = Path(place) / "catalog", Path(place) / "tiny"
        directory.mkdir()
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
        )
        torch.manual_seed(1)
        transformers.BertModel(config).save_pretrained(tiny)
        tokenizer.save_pretrained(tiny)
        for name, source, dims in ((SMALL, MODEL_DIR, 384), (TINY, tiny, 128)):
            entry = {
                "id": name,
                "source": {"kind": "directory", "path": str(source)},
                "adapter": "dense",
                "outputs": {"dense": {"dims": dims}},
                "max_sequence_length": 256,
                "loadtime": {"pooling": "mean", "normalize": True},
            }
            (directory / f"{name.partition('/')[2]}.yaml").write_text(json.dumps(entry))
        yield directory


class Contest:
    """The rounds of one server."""

    def __init__(self, report: Report, address: Address, seconds: float) -> None:
        self._report, self._address, self._seconds = report, address, seconds
        self._rates: dict[str, float] = {}
        self.samples: list[Sample] = []

    def warm(self) -> None:
        """Find out how fast a lone client is, which sets the rate of the queries."""
        for model in (SMALL, TINY):
            asked = [request(model, [text]) for text in passages(_WARM + _LONE)]
            closed_loop(self._address, asked[:_WARM], 8)
            self._rates[model] = _SHARE / median(one_by_one(self._address, asked[_WARM:]).latencies_s)
            self._report.say(f"{model}: {self._rates[model]:.1f} queries/s")

    def _ask(self, quiet: str, turn: int) -> tuple[float, float, int]:
        """p50, p99 in ms and the number of failed queries."""
        rate, found = self._rates[quiet], passages()
        before, count = max(1, int(rate * _LEAD_S)), max(50, int(rate * self._seconds))
        asked = [request(quiet, [found[at % len(found)]]) for at in range(before + count)]
        open_loop(self._address, asked[:before], rate, seed=turn)
        result = open_loop(self._address, asked[before:], rate, seed=turn)
        return result.latency_ms(50), result.latency_ms(99), result.failed

    def _beside(self, quiet: str, flood: Flood, turn: int) -> Sample:
        with flooded(self._address, flood.model, flood.requests(), flood.clients):
            time.sleep(_FORGET_S)
            began = batches(self._address, flood.model)
            time.sleep(self._seconds / 4)
            alone = batches(self._address, flood.model)
            latency = self._ask(quiet, turn)
            ended = batches(self._address, flood.model)
        without, meanwhile = alone.since(began), ended.since(alone)
        return Sample(
            quiet,
            flood.name,
            quiet == flood.model,
            turn,
            *latency,
            meanwhile.tokens / meanwhile.read_s,
            without.tokens / without.read_s,
            without.read_s / max(1.0, without.count) * 1e3,
            meanwhile.read_s / max(1.0, meanwhile.count) * 1e3,
        )

    def round(self, turn: int) -> None:
        """Every model's queries alone, then beside each load."""
        for quiet, floods in FLOODS.items():
            self._keep(Sample(quiet, "", True, turn, *self._ask(quiet, turn)))
            for flood in floods:
                self._keep(self._beside(quiet, flood, turn))

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        beside = f" beside {sample.beside}" if sample.beside else ""
        text = f"{sample.quiet}{beside}: p50 {sample.p50_ms:.1f} ms, p99 {sample.p99_ms:.1f} ms"
        self._report.say(f"round {sample.round + 1}: {text}")


def middle(samples: Sequence[Sample], base: dict[tuple[str, int], Sample]) -> dict[str, float]:
    """Medians over rounds; `ratio` and the extra times are against the same queries alone in the same round."""
    pairs = [(sample, base[sample.quiet, sample.round]) for sample in samples]
    kept = [s.flood_tokens_per_s / s.undisturbed_tokens_per_s for s in samples if s.undisturbed_tokens_per_s]
    return {
        "p50": median(sample.p50_ms for sample in samples),
        "p99": median(sample.p99_ms for sample in samples),
        "ratio": median(sample.p99_ms / alone.p99_ms for sample, alone in pairs),
        "extra p50": median(sample.p50_ms - alone.p50_ms for sample, alone in pairs),
        "extra p99": median(sample.p99_ms - alone.p99_ms for sample, alone in pairs),
        "batch": median(sample.batch_ms for sample in samples),
        "batch beside": median(sample.batch_ms_beside for sample in samples),
        "kept": median(kept) if kept else 0.0,
    }


def show(report: Report, samples: Sequence[Sample]) -> None:
    """One table for the load of the other model, one for a bulk job of the same, and both verdicts."""
    base = {(sample.quiet, sample.round): sample for sample in samples if not sample.beside}
    others: list[Row] = []
    own: list[Row] = []
    for quiet, floods in FLOODS.items():
        alone = middle([sample for sample in samples if (sample.quiet, sample.beside) == (quiet, "")], base)
        others.append([f"{quiet}, alone", alone["p50"], alone["p99"], 1.0, None, None])
        for flood in floods:
            key = (quiet, flood.name, quiet == flood.model)
            found = middle([s for s in samples if (s.quiet, s.beside, s.same_model) == key], base)
            if quiet == flood.model:
                times = [found[name] for name in ("p50", "p99", "extra p50", "extra p99")]
                own.append([quiet, *times, found["batch"], found["batch beside"], found["kept"]])
                name = f"{quiet} beside its own bulk job: extra p99 at most one full batch of it"
                target(report, name, found["extra p99"] / found["batch"], 1)
                short = [found[name] / found["batch beside"] for name in ("extra p50", "extra p99")]
                report.note(
                    f"{quiet}: extra p50 and p99 in batches as they are beside queries: {short[0]:.1f}, {short[1]:.1f}."
                )
            else:
                times = [found[name] for name in ("p50", "p99", "ratio", "batch", "kept")]
                others.append([f"{quiet}, {flood.name} of {flood.model}", *times])
                name = f"{quiet} beside {flood.name} of {flood.model}: p99 at most {MOST_RATIO:g} times that alone"
                target(report, name, found["ratio"], MOST_RATIO)
    heads = ["queries of, beside", "p50 ms", "p99 ms", "p99 to alone", "batch of the load ms", "load kept"]
    report.table("Two models", heads, others)
    heads = [
        "model",
        "p50 ms",
        "p99 ms",
        "extra p50",
        "extra p99",
        "batch ms",
        "batch ms beside",
        "load kept",
    ]
    report.table("A query beside a bulk job of its own model", heads, own)


def target(report: Report, text: str, found: float, most: float) -> None:
    """Say whether a target is met."""
    report.note(f"Target: {text}: {found:.2f}, {'met' if found <= most else 'missed'}.")


def run(threads: int, rounds: int, seconds: float) -> Report:
    """Measure and save the report."""
    settings = {"threads": threads, "rounds": rounds, "seconds": seconds, "corpus": fingerprint(passages())}
    report = Report("fairness", "Queries beside the load of others", settings)
    with catalog() as directory:
        chosen: Settings = {
            "catalog.dirs": str(directory),
            "worker.torch_threads": threads,
            "worker.count": 1,
        }
        with penstock(f"{SMALL},{TINY}", chosen) as server:
            contest = Contest(report, server.address, seconds)
            contest.warm()
            for turn in range(rounds):
                contest.round(turn)
    show(report, contest.samples)
    report.save([asdict(sample) for sample in contest.samples])
    return report


def main() -> None:
    """Read the command line and run."""
    options = parser(__doc__)
    add_threads(options)
    options.add_argument("--rounds", type=int, help="default 1, or 3 with --full")
    options.add_argument("--seconds", type=float, help="of queries in each run; default 8, or 30 with --full")
    chosen = options.parse_args()
    rounds, seconds = (3, 30.0) if chosen.full else (1, 8.0)
    run(chosen.threads, chosen.rounds or rounds, chosen.seconds or seconds)


if __name__ == "__main__":
    main()
