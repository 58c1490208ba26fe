"""An encoder and a generator in one worker: what each does alone and beside the other.

1. Serve all-MiniLM-L6-v2 and a Llama of 30 M parameters with random weights in one worker with one torch thread.
2. In every round, load the encoder alone, then the generator alone, then both, for some seconds each: 16 clients that
   send one text after the other, and 8 streams that never end.
3. Each is compared with itself alone. Halves would be fair; a share near nothing would be starving.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.chat_models import generator, letters, list_model
from benchmarks.corpus import passages
from benchmarks.flood import batches, flooded
from benchmarks.load import Address, percentile, post
from benchmarks.options import parser
from benchmarks.peers.servers import MODEL_DIR
from benchmarks.report import Report, Row
from benchmarks.serving import Settings, penstock
from benchmarks.streaming import Readers, chat

ENCODER, GENERATOR = "bench/small", "bench/llama"
CLIENTS, STREAMS = 16, 8
LEAST_SHARE = 0.25
"""Less than this of what a model does alone counts as starving."""
ENDLESS = 8192
ALONE, BOTH = ("encoder alone", "generator alone"), "both"


@dataclass(frozen=True, slots=True)
class Sample:
    """One phase of a round; a model without work has zeros. Gaps are times between the tokens of a stream."""

    phase: str
    encoder_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0


@contextlib.contextmanager
def encoding(address: Address) -> Iterator[None]:
    """Clients of the encoder, each with one text after the other."""
    requests = [post(f"/v1/encode/{ENCODER}", {"items": [{"text": text}]}) for text in passages()]
    with flooded(address, ENCODER, requests, CLIENTS):
        yield


@contextlib.contextmanager
def talking(address: Address, turn: str) -> Iterator[Readers]:
    """Streams that have all begun and do not end meanwhile."""
    with Readers(address) as readers:
        streams = [
            readers.send(chat(GENERATOR, letters(64, f"{turn} {at}"), ENDLESS)) for at in range(STREAMS)
        ]
        while not all(stream.answered_at for stream in streams):
            readers.look()
        yield readers


def measure(
    address: Address, phase: str, seconds: float, readers: Readers | None, least_gaps: int = 0
) -> Sample:
    """What the models do in some seconds, and until each stream has written `least_gaps` further tokens."""
    streams = readers.streams if readers else []
    begun, before = batches(address, ENCODER), [len(stream.gaps_s) for stream in streams]
    until = time.perf_counter() + seconds
    while (left_s := until - time.perf_counter()) > 0 or any(
        len(stream.gaps_s) < at + least_gaps for stream, at in zip(streams, before, strict=True)
    ):
        if readers:
            readers.look()
        else:
            time.sleep(left_s)
    encoded = batches(address, ENCODER).since(begun)
    gaps = [gap for stream, at in zip(streams, before, strict=True) for gap in stream.gaps_s[at:]]
    if not gaps:
        return Sample(phase, encoded.tokens / encoded.read_s)
    # NOTE: an event is a token here, and events that are read together are rare at this pace.
    timing = percentile(gaps, 50) * 1e3, percentile(gaps, 99) * 1e3
    return Sample(phase, encoded.tokens / encoded.read_s, len(gaps) / encoded.read_s, *timing)


def round_of(address: Address, turn: int, seconds: float) -> list[Sample]:
    """The encoder alone, the generator alone, both."""
    with encoding(address):
        samples = [measure(address, ALONE[0], seconds, None)]
    with talking(address, f"alone {turn}") as readers:
        samples.append(measure(address, ALONE[1], seconds, readers))
    with talking(address, f"both {turn}") as readers, encoding(address):
        readers.look()
        samples.append(measure(address, BOTH, seconds, readers))
    return samples


def run(rounds: int, seconds: float) -> Report:
    """Measure and save the report."""
    report = Report(
        "sharing", "An encoder and a generator in one worker", {"rounds": rounds, "seconds": seconds}
    )
    samples: list[Sample] = []
    with generator(GENERATOR, "30M") as (_, catalog):
        list_model(
            catalog,
            ENCODER,
            MODEL_DIR,
            "dense",
            {"dense": {"dims": 384}},
            max_sequence_length=256,
            loadtime={"pooling": "mean", "normalize": True},
        )
        settings: Settings = {
            "catalog.dirs": str(catalog),
            "server.frontends": 1,
            "worker.count": 1,
            "worker.torch_threads": 1,
            "worker.precision": "float32",
        }
        with penstock(f"{ENCODER},{GENERATOR}", settings) as server:
            for turn in range(rounds):
                samples += round_of(server.address, turn, seconds)
                report.say(f"round {turn + 1}/{rounds}: {samples[-3:]}")
    show(report, samples)
    report.save([asdict(sample) for sample in samples])
    return report


def show(report: Report, samples: list[Sample]) -> None:
    """A row for each phase, and what each model keeps beside the other."""

    def middle(phase: str, name: str) -> float:
        return median(float(getattr(sample, name)) for sample in samples if sample.phase == phase)

    fields = ("encoder_tokens_per_s", "tokens_per_s", "gap_p50_ms", "gap_p99_ms")
    rows: list[Row] = [[phase, *(middle(phase, name) or None for name in fields)] for phase in (*ALONE, BOTH)]
    heads = ["phase", "encoder tokens/s", "generated tokens/s", "gap p50 ms", "gap p99 ms"]
    report.table(f"{CLIENTS} clients of the encoder, {STREAMS} streams", heads, rows)
    for phase, name in zip(ALONE, fields, strict=False):
        share = middle(BOTH, name) / middle(phase, name)
        text = f"beside the other the {phase.split()[0]} keeps at least {LEAST_SHARE:g} of its pace alone"
        report.note(f"Target: {text}: {share:.2f}, {'met' if share >= LEAST_SHARE else 'missed'}.")


def main() -> None:
    """Read the command line and run."""
    chosen = parser(__doc__).parse_args()
    run(*((5, 20.0) if chosen.full else (1, 6.0)))


if __name__ == "__main__":
    main()
