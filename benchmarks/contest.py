"""One turn of one contestant in the encode benchmark, and the samples that turns leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.connection import Connection, one_by_one
from benchmarks.load import closed_loop, percentile
from benchmarks.loops.parent import LoopProcess
from benchmarks.peers.servers import request, vectors_of
from benchmarks.processes import Server, cpu_seconds, memory_nbytes
from benchmarks.serving import MINILM

MANY, GROUPS, LONE = "64 x 1", "8 x 32", "1 x 1"
_LOADS = {MANY: (64, 1), GROUPS: (8, 32)}
CHECKED_TEXTS = 16
_WARM_REQUESTS = 48
_LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.995}


class WrongAnswer(RuntimeError):
    """The embeddings of a contestant differ from those of the model."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement in one round. `load` is clients x texts a request; a loop has the load it is compared with."""

    contestant: str
    precision: str
    load: str
    round: int
    texts_per_s: float
    p50_ms: float | None = None
    p99_ms: float | None = None
    cores: float | None = None
    memory_mib: float | None = None
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The task of every contestant: encode `texts`, then `lone` of them one by one; `reference` is the truth."""

    texts: Sequence[str]
    lone: int
    reference: Sequence[Sequence[float]]

    def compare(self, contestant: str, precision: str, vectors: Sequence[Sequence[float]]) -> None:
        """Raise WrongAnswer unless all `vectors` point where the reference does."""
        ours, truth = np.asarray(vectors, np.float64), np.asarray(self.reference[: len(vectors)], np.float64)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(truth, axis=1)
        least = float(((ours * truth).sum(axis=1) / norms).min())
        if not least >= _LEAST_COSINE[precision]:
            raise WrongAnswer(f"{contestant} {precision}: least cosine to the model is {least:.5f}")


def loop_turn(loops: LoopProcess, work: Work, turn: int) -> list[Sample]:
    """Every candidate of one engine once over the texts, and one text at a time."""
    samples = []
    for name in loops.names:
        contestant = f"{loops.engine}: {name}"
        found = loops.run(name, len(work.texts))
        rate, cores = len(work.texts) / found["wall_s"], found["cpu_s"] / found["wall_s"]
        samples.append(Sample(contestant, loops.precision, MANY, turn, rate, cores=cores))
        lone = loops.lone(name, work.lone)
        p50, p99 = percentile(lone, 50) * 1e3, percentile(lone, 99) * 1e3
        samples.append(Sample(contestant, loops.precision, LONE, turn, len(lone) / sum(lone), p50, p99))
    work.compare(loops.engine, loops.precision, loops.vectors(CHECKED_TEXTS))
    return samples


def server_turn(server: Server, precision: str, work: Work, turn: int) -> list[Sample]:
    """Warm up, check the answers, then both loads and the lone client."""
    texts, model = list(work.texts), MINILM if server.name == "penstock" else "minilm"
    closed_loop(server.address, [request(server.name, [text], model) for text in texts[-_WARM_REQUESTS:]], 8)
    with Connection(server.address) as connection:
        _, body = connection.fetch(request(server.name, texts[:CHECKED_TEXTS], model))
    work.compare(server.name, precision, vectors_of(body))
    samples = []
    for load, (clients, size) in _LOADS.items():
        groups = [texts[start : start + size] for start in range(0, len(texts), size)]
        requests = [request(server.name, group, model) for group in groups]
        before = cpu_seconds(server.pids())
        result = closed_loop(server.address, requests, clients)
        cores = (cpu_seconds(server.pids()) - before) / result.wall_s
        rate = result.rate_per_s * len(texts) / len(groups)
        timing = (result.latency_ms(50), result.latency_ms(99))
        memory = sum(memory_nbytes(pid)["pss"] for pid in server.pids()) / 2**20
        samples.append(
            Sample(server.name, precision, load, turn, rate, *timing, cores, memory, result.failed)
        )
    result = one_by_one(server.address, [request(server.name, [text], model) for text in texts[: work.lone]])
    timing = (result.latency_ms(50), result.latency_ms(99))
    samples.append(
        Sample(server.name, precision, LONE, turn, result.rate_per_s, *timing, failed=result.failed)
    )
    return samples


@dataclass(frozen=True, slots=True)
class Found:
    """All samples of a run, with the questions that tables ask."""

    samples: Sequence[Sample]

    def rates(self, contestant: str, precision: str, load: str) -> dict[int, float]:
        """texts/s by round."""
        chosen = (
            s for s in self.samples if (s.contestant, s.precision, s.load) == (contestant, precision, load)
        )
        return {sample.round: sample.texts_per_s for sample in chosen}

    def median(self, contestant: str, precision: str, load: str, value: str) -> float | None:
        """Median over rounds of one field of the samples; None when it was not measured."""
        chosen = [
            s for s in self.samples if (s.contestant, s.precision, s.load) == (contestant, precision, load)
        ]
        values = [found for sample in chosen if (found := getattr(sample, value)) is not None]
        return median(values) if values else None

    def contestants(self, precision: str, load: str) -> list[str]:
        """Names in the order of their first sample."""
        return list(
            dict.fromkeys(s.contestant for s in self.samples if (s.precision, s.load) == (precision, load))
        )

    def best_loop(self, engine: str, precision: str, load: str) -> str | None:
        """The candidate of `engine` with the highest median rate."""
        names = [name for name in self.contestants(precision, load) if name.startswith(f"{engine}: ")]
        return max(
            names, key=lambda name: self.median(name, precision, load, "texts_per_s") or 0.0, default=None
        )

    def ratio(
        self, ours: str, theirs: str, precision: str, load: str, their_load: str | None = None
    ) -> float | None:
        """Median over the rounds that both took part in of ours / theirs."""
        mine = self.rates(ours, precision, load)
        other = self.rates(theirs, precision, their_load or load)
        both = [mine[turn] / other[turn] for turn in mine if turn in other]
        return median(both) if both else None
