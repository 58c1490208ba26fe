"""A connection to a worker that is only its state: what routing looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from frontend.engine.local.catalog_following import ToldCatalog
from ipc.wire.messages import Credits, ModelStatus, Work
from ipc.wire.stats import Stats


@dataclass
class FakeChannel:
    """The attributes of `frontend.engine.local.channel.Channel` that decide where a request goes."""

    slot: int
    models: dict[str, ModelStatus] = field(default_factory=dict)
    state: str = "ready"
    responsive: bool = True
    preloaded: bool = False
    since: float = 0.0
    device: str = "cpu"
    uuid: str = "cpu"
    threads: int = 1
    stats: Stats | None = None
    catalog: ToldCatalog = field(default_factory=ToldCatalog)
    free_bytes: int = 0
    cost: int = 0
    work_s: float = 0.0
    foreign_s: float = 0.0
    credit: bool = True
    streams: Any = field(default_factory=lambda: SimpleNamespace(texts={}))
    credits: Credits = field(default_factory=lambda: Credits(1000.0, 0.0, 100.0))

    loads: list[str] = field(default_factory=list)
    """The models that the worker was asked to load."""

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return f"worker-{self.slot}"

    def send_load(self, model: str, explicit: bool = False) -> bool:
        """Note that the worker was asked."""
        self.loads.append(model)
        return True

    def wait_s(self, lane: str) -> float:
        """As the worker has told."""
        return self.credits.bulk_wait_s if lane == "bulk" else self.credits.wait_s

    def has_credit(self, work: Work) -> bool:
        """As the test says."""
        return self.credit
