"""One metric family as a row of a table, and the buckets that families share."""

from __future__ import annotations

from typing import Literal, NamedTuple

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZE_BUCKETS = tuple(2.0**n for n in range(11))
TOKEN_BUCKETS = tuple(2.0**n for n in range(6, 17))
RATIO_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)

GaugeMode = Literal["livesum", "livemax", "livemostrecent", "max"]
"""`max` keeps the values of slots that run no more; only for instants, which never go back."""
Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """One family; `attribute` is its name in the code."""

    attribute: str
    kind: Kind
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    mode: GaugeMode = "livesum"
