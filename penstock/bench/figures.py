"""The figures of a run out of its samples, as an object, as lines for people, and as a histogram."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock import terminal

_QUANTILES = (50, 90, 99)
_BINS, _WIDTH = 12, 40


class Sample(msgspec.Struct):
    """One request. `error` is a status code or a reason, "" for a request that succeeded; `tokens` 0: not told.

    A stream has the time to its first token, and the times between tokens.
    """

    latency_s: float
    error: str = ""
    tokens: int = 0
    first_s: float | None = None
    gaps_s: list[float] = msgspec.field(default_factory=list)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value of sorted `values` that at least `percent` percent of them do not exceed."""
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


def figures(samples: Sequence[Sample], elapsed_s: float, items: int) -> dict[str, Any]:
    """The figures; latencies are milliseconds of requests that succeeded, rates count these requests only."""
    good = [sample for sample in samples if not sample.error]
    span_s = max(elapsed_s, 1e-9)
    tokens = sum(sample.tokens for sample in good)
    return {
        "requests": len(samples),
        "succeeded": len(good),
        "elapsed_s": round(elapsed_s, 3),
        "requests_per_s": round(len(good) / span_s, 2),
        "items_per_s": round(len(good) * items / span_s, 2),
        "tokens_per_s": round(tokens / span_s, 2) if tokens else None,
        "latency_ms": _spread([sample.latency_s for sample in good]),
        "first_token_ms": _spread([sample.first_s for sample in good if sample.first_s is not None]),
        "between_tokens_ms": _spread([gap for sample in good for gap in sample.gaps_s]),
        "errors": dict(sorted(Counter(sample.error for sample in samples if sample.error).items())),
    }


def _spread(values_s: list[float]) -> dict[str, float] | None:
    if not values_s:
        return None
    values_s.sort()
    spread = {f"p{percent}": percentile(values_s, percent) for percent in _QUANTILES} | {"max": values_s[-1]}
    return {name: round(value * 1e3, 3) for name, value in spread.items()}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    failed = found["requests"] - found["succeeded"]
    yield f"{found['succeeded']} requests succeeded, {failed} failed, in {found['elapsed_s']:.2f} s"
    rates = [("requests", "requests_per_s"), ("items", "items_per_s"), ("tokens", "tokens_per_s")]
    yield ", ".join(f"{found[name]:,.1f} {noun}/s" for noun, name in rates if found[name] is not None)
    names = {"latency": "latency_ms", "first token": "first_token_ms", "between tokens": "between_tokens_ms"}
    spreads = [(label, found[name]) for label, name in names.items() if found[name]]
    if spreads:
        head = ("MILLISECONDS", *(name.upper() for name in spreads[0][1]))
        yield from terminal.table(
            [head, *((label, *(f"{value:.2f}" for value in spread.values())) for label, spread in spreads)]
        )
    for error, count in found["errors"].items():
        yield terminal.styled(f"failed: {error}, {count} times", "bad")


def histogram(latencies_s: Sequence[float]) -> Iterator[str]:
    """A line for each of a few ranges of latency, each as much wider than the range before."""
    least, most = max(min(latencies_s), 1e-6), max(latencies_s)
    ratio = math.log(max(most / least, 1.0 + 1e-9))
    counts = [0] * _BINS
    for value in latencies_s:
        place = int(math.log(max(value, least) / least) / ratio * _BINS)
        counts[min(place, _BINS - 1)] += 1
    for place, count in enumerate(counts):
        end_ms = least * math.exp(ratio * (place + 1) / _BINS) * 1e3
        bar = "#" * math.ceil(_WIDTH * count / max(counts))
        yield f"to {end_ms:10.2f} ms {count:8d} {bar}".rstrip()
