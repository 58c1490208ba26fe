"""Counts every HTTP request from its head to the last byte of its answer (`http_*`), and writes the access log.

1. `serve` opens a record of the request and keeps the record in the ASGI scope.
2. `RequestMiddleware` tells the route, once routing has found one, and the status of the answer. A responder that
   learns the model from the body tells the model.
3. When the application has sent everything, also the end of a stream, the record is closed and counted.

Labels are bounded: the route is a template, the model one of the catalog, the method one of HTTP's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Container
from functools import lru_cache
from typing import Any, NamedTuple

from ipc.metrics.families import UNKNOWN
from ipc.metrics.registry import FrontendMetrics
from ipc.metrics.tally import Amount, Observations
from ipc.settings import Log

log = logging.getLogger(__name__)

RECORD_KEY = "penstock.http"
NO_MODEL = "none"
"""Label of routes that need no model."""
UNMATCHED = "<unmatched>"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"))
_UNCOUNTED = ("/docs", "/redoc", "/openapi.json", "/api-doc/openapi.json")
_PROBES = frozenset(("/", "/health", "/healthz", "/livez", "/readyz", "/metrics"))
_SHOWN_PATH = 200

Receive = Callable[[], Awaitable[dict[str, Any]]]


class _Families(NamedTuple):
    requests: Amount
    seconds: Observations
    body: Observations


class HttpCounts:
    """The families of HTTP requests, and what they are counted by."""

    def __init__(self, metrics: FrontendMetrics, models: Container[str], settings: Log) -> None:
        self._metrics, self._models, self._log = metrics, models, settings
        self._gauges = lru_cache(maxsize=4096)(self._gauge)
        self._families = lru_cache(maxsize=4096)(self._family)

    def record(self, scope: dict[str, Any]) -> HttpRecord | None:
        """A record of the request of an ASGI scope; None for requests that are neither counted nor logged."""
        path = scope["path"]
        counted = scope["method"] != "OPTIONS" and path not in _PROBES and not path.startswith(_UNCOUNTED)
        logged = self._log.access and (counted or self._log.access_health)
        return HttpRecord(self, scope, counted, logged) if counted or logged else None

    async def serve(
        self, app: Any, declared: int | None, scope: dict[str, Any], receive: Receive, send: Any
    ) -> None:
        """Let `app` answer one request, and count it; `declared` is the size of the body by its head."""
        record = self.record(scope)
        if record is None:
            await app(scope, receive, send)
            return
        scope[RECORD_KEY] = record
        try:
            await app(scope, record.measured(declared, receive), send)
        finally:
            record.close()

    def label(self, model: str) -> str:
        """The model's name if the catalog has the model, so that clients cannot invent label values."""
        return model if model == NO_MODEL or model in self._models else UNKNOWN

    def in_flight(self, method: str, route: str, model: str) -> Amount:
        """The gauge of requests that are being answered."""
        return self._gauges(method, route, model)

    def ended(self, method: str, route: str, model: str, status: str) -> _Families:
        """The counter and histograms of requests that ended alike."""
        return self._families(method, route, model, status)

    def _gauge(self, *labels: str) -> Amount:
        return self._metrics.tally.amount(self._metrics.http_in_flight.labels(*labels))

    def _family(self, method: str, route: str, model: str, status: str) -> _Families:
        metrics, tally = self._metrics, self._metrics.tally
        labels = method, route, model, status
        return _Families(
            tally.amount(metrics.http_requests.labels(*labels)),
            tally.observations(metrics.http_duration.labels(*labels)),
            tally.observations(metrics.http_body.labels(*labels[:3])),
        )


class HttpRecord:
    """One request. `model` is the label of its model, `status` 0 until there is an answer."""

    __slots__ = (
        "_began",
        "_counted",
        "_counts",
        "_gauge",
        "_logged",
        "_method",
        "_nbytes",
        "_path",
        "model",
        "request_id",
        "route",
        "status",
    )

    def __init__(self, counts: HttpCounts, scope: dict[str, Any], counted: bool, logged: bool) -> None:
        self._counts, self._counted, self._logged = counts, counted, logged
        method: str = scope["method"]
        self._method, self._path = method if method in _METHODS else "other", scope["path"]
        self._began = time.perf_counter()
        self._gauge: Amount | None = None
        self._nbytes: int | None = None
        self.route, self.model, self.status, self.request_id = "", NO_MODEL, 0, ""

    def measured(self, declared: int | None, receive: Receive) -> Receive:
        """`receive`, which counts the bytes of the body where its head does not declare them."""
        self._nbytes = declared
        if declared is not None or self._method in ("GET", "HEAD"):
            return receive

        async def counting() -> dict[str, Any]:
            message = await receive()
            if message["type"] == "http.request":
                self._nbytes = (self._nbytes or 0) + len(message.get("body", b""))
            return message

        return counting

    def routed(self, route: str, model: str) -> None:
        """The request has a route; `model` is a name, "" for one that the body may tell, or `NO_MODEL`."""
        self.route, self.model = route, self._counts.label(model)
        self._rise()
        if self._logged:
            self._line("started", {})

    def name(self, model: str) -> None:
        """The body names this model."""
        label = self._counts.label(model)
        if label != self.model and self._gauge is not None:
            self._fall()
            self.model = label
            self._rise()

    def close(self) -> None:
        """The last byte was sent, or nobody waits for it any more."""
        seconds = time.perf_counter() - self._began
        self._fall()
        if not self.status:
            return
        if self._counted:
            families = self._counts.ended(self._method, self.route or UNMATCHED, self.model, str(self.status))
            families.requests.inc()
            families.seconds.observe(seconds)
            if self._nbytes is not None:
                families.body.observe(self._nbytes)
        if self._logged:
            milliseconds = round(seconds * 1e3, 3)
            fields = {"status": self.status, "model": self.model, "duration_ms": milliseconds}
            self._line(f"{self.status} in {milliseconds:.3f} ms, model {self.model}", fields)

    def _rise(self) -> None:
        if self._counted:
            self._gauge = self._counts.in_flight(self._method, self.route, self.model)
            self._gauge.inc()

    def _fall(self) -> None:
        if self._gauge is not None:
            self._gauge.inc(-1)
            self._gauge = None

    def _line(self, text: str, fields: dict[str, Any]) -> None:
        route, path = self.route or UNMATCHED, self._path[:_SHOWN_PATH]
        known = {"method": self._method, "route": route, "path": path, **fields}
        log.info("%s %s %s %s", self.request_id, self._method, path, text, extra=known)
