"""Counts requests, phases and refusals, with the label children looked up once."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ipc.metrics import UNKNOWN, FrontendMetrics

_REJECTIONS = {
    "QUEUE_FULL": "queue_full",
    "NO_REPLICA": "no_worker",
    "MODEL_LOADING": "loading",
    "MODEL_NOT_LOADED": "loading",
    "LORA_LOADING": "loading",
    "SHM_EXHAUSTED": "queue_full",
    "DEADLINE_EXCEEDED": "deadline",
    "INPUT_TOO_LONG": "too_long",
    "BODY_TOO_LARGE": "too_long",
    "DRAINING": "draining",
}
_SIE_PHASES = {"total": "total", "queue": "queue", "tokenize": "tokenize", "device": "inference"}


class Recorder:
    """Writes one request into all families it belongs to."""

    def __init__(self, metrics: FrontendMetrics, models: Container[str]) -> None:
        self._metrics, self._models = metrics, models
        self._children = lru_cache(maxsize=4096)(self._child)

    def _child(self, family: str, labels: tuple[str, ...]) -> Any:
        return getattr(self._metrics, family).labels(*labels)

    def model_label(self, model: str) -> str:
        """The model's name if the catalog has it, so that clients cannot invent label values."""
        return model if model in self._models else UNKNOWN

    def finished(
        self, protocol: str, operation: str, model: str, status: str, code: str, phases: dict[str, float]
    ) -> None:
        """One request ended with HTTP `status` and error `code` (empty for success); `phases` are milliseconds."""
        model = self.model_label(model)
        self._children("requests", (protocol, operation, model, status)).inc()
        if protocol == "sie":
            outcome = "queue_full" if code == "QUEUE_FULL" else "error" if code else "success"
            self._children("sie_requests", (model, operation, outcome)).inc()
        if code in _REJECTIONS:
            self._children("rejected", (model, _REJECTIONS[code])).inc()
        for phase, milliseconds in phases.items():
            if milliseconds <= 0:
                continue
            self._children("duration", (operation, model, phase)).observe(milliseconds / 1000)
            if protocol == "sie" and phase in _SIE_PHASES:
                self._children("sie_duration", (model, operation, _SIE_PHASES[phase])).observe(
                    milliseconds / 1000
                )

    def called(self, key: str, code: str) -> None:
        """A request with the API key of that name, or without one of the file, ended with HTTP status `code`."""
        self._children("by_key", (key, code)).inc()

    def refused(self, reason: str) -> None:
        """A request was refused for what its key is or may: unauthenticated, forbidden or rate_limited."""
        self._children("access_refused", (reason,)).inc()

    def traced(self, outcome: str, requests: int) -> None:
        """The spans of that many requests were exported, could not be (failed), or found no room (dropped)."""
        self._metrics.traced.labels(outcome).inc(requests)

    @contextmanager
    def in_flight(self, model: str, lane: str) -> Iterator[None]:
        """One more request is being served meanwhile; its label stays though the model may leave the catalog."""
        label = self.model_label(model)
        gauges = (self._children("in_flight", (label, lane)), self._children("sie_active", (label,)))
        for gauge in gauges:
            gauge.inc()
        try:
            yield
        finally:
            for gauge in gauges:
                gauge.dec()

    def retried(self, reason: str) -> None:
        """A request was sent again."""
        self._metrics.retries.labels(reason).inc()

    def poisoned(self, reason: str) -> None:
        """An input was found to crash workers, or refused because it did."""
        self._metrics.poison.labels(reason).inc()
