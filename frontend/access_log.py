"""Writes the access log, and counts every HTTP request from its head to the last byte of its answer (`http_*`).

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
from ipc.metrics.registry import Amount, FrontendMetrics, Observations
from ipc.settings import Log

log = logging.getLogger(__name__)

RECORD_KEY = "penstock.http"
NO_MODEL = "none"
"""Label of routes that need no model."""
UNMATCHED = "<unmatched>"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"))
_SHOWN_PATH = 200

Receive = Callable[[], Awaitable[dict[str, Any]]]


class _Ended(NamedTuple):
    """What requests with one status count into."""

    requests: Amount
    seconds: Observations


class _Labels:
    """The families of requests with one method, route and model. PERF: found once for a request."""

    __slots__ = ("_ended", "_metrics", "_values", "body", "in_flight", "model", "route")

    def __init__(self, metrics: FrontendMetrics, method: str, route: str, model: str) -> None:
        self._metrics, self._values = metrics, (method, route, model)
        self._ended: dict[int, _Ended] = {}
        self.route, self.model = route, model
        self.in_flight = metrics.tally.amount(metrics.http_in_flight.labels(*self._values))
        self.body = metrics.tally.observations(metrics.http_body.labels(*self._values))

    def ended(self, status: int) -> _Ended:
        """The counter and the histogram of requests with this status."""
        ended = self._ended.get(status)
        if ended is None:
            metrics, values = self._metrics, (*self._values, str(status))
            ended = self._ended[status] = _Ended(
                metrics.tally.amount(metrics.http_requests.labels(*values)),
                metrics.tally.observations(metrics.http_duration.labels(*values)),
            )
        return ended


class HttpCounts:
    """Keeps the records of HTTP requests. Without `counting` requests have lines in the log only."""

    def __init__(
        self, metrics: FrontendMetrics, models: Container[str], settings: Log, counting: bool = True
    ) -> None:
        self._metrics, self._models, self._log, self._counting = metrics, models, settings, counting
        self.labels = lru_cache(maxsize=4096)(self._labels)

    def record(self, scope: dict[str, Any], counted: bool) -> HttpRecord | None:
        """A record of the request of an ASGI scope; None for requests that are neither counted nor logged.

        `counted` says whether requests of the path are counted.
        """
        counted = counted and scope["method"] != "OPTIONS"
        logged = self._log.access and (counted or self._log.access_health)
        counted = counted and self._counting
        return HttpRecord(self, scope, counted, logged) if counted or logged else None

    async def serve(
        self,
        app: Any,
        declared: int | None,
        counted: bool,
        scope: dict[str, Any],
        receive: Receive,
        send: Any,
    ) -> None:
        """Let `app` answer one request, and count it; `declared` is the size of the body by its head."""
        record = self.record(scope, counted)
        if record is None:
            await app(scope, receive, send)
            return
        scope[RECORD_KEY] = record
        try:
            await app(scope, record.measured(declared, receive), send)
        finally:
            record.close()

    def _labels(self, method: str, route: str, model: str) -> _Labels:
        """Labels of a request. A model that the catalog lacks is `unknown`: clients cannot invent label values."""
        known = model == NO_MODEL or model in self._models
        return _Labels(self._metrics, method, route, model if known else UNKNOWN)


class HttpRecord:
    """One request. `status` is 0 until there is an answer."""

    __slots__ = (
        "_began",
        "_counted",
        "_counts",
        "_labels",
        "_logged",
        "_method",
        "_nbytes",
        "_path",
        "request_id",
        "status",
    )

    def __init__(self, counts: HttpCounts, scope: dict[str, Any], counted: bool, logged: bool) -> None:
        self._began = time.perf_counter()
        self._counts, self._counted, self._logged = counts, counted, logged
        method: str = scope["method"]
        self._method, self._path = method if method in _METHODS else "other", scope["path"]
        self._labels: _Labels | None = None
        self._nbytes: int | None = None
        self.status, self.request_id = 0, ""

    @property
    def route(self) -> str:
        """Template of the route; empty before routing, and where there is none."""
        return self._labels.route if self._labels is not None else ""

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
        self._label(route, model)
        if self._logged:
            self._line("started", {})

    def name(self, model: str) -> None:
        """The body names this model."""
        if self._labels is not None and self._labels.model != model:
            self._label(self._labels.route, model)

    def close(self) -> None:
        """The last byte was sent, or the client has gone."""
        seconds = time.perf_counter() - self._began
        if self.status:
            if self._labels is None:
                self._label(UNMATCHED, NO_MODEL)
            assert self._labels is not None
            if self._counted:
                self._count(self._labels, seconds)
            if self._logged:
                model, milliseconds = self._labels.model, round(seconds * 1e3, 3)
                fields = {"status": self.status, "model": model, "duration_ms": milliseconds}
                self._line(f"{self.status} in {milliseconds:.3f} ms, model {model}", fields)
        if self._counted and self._labels is not None:
            self._labels.in_flight.inc(-1)

    def _count(self, labels: _Labels, seconds: float) -> None:
        ended = labels.ended(self.status)
        ended.requests.inc()
        ended.seconds.observe(seconds)
        if self._nbytes is not None:
            labels.body.observe(self._nbytes)

    def _label(self, route: str, model: str) -> None:
        """Count the request in flight under `route` and `model`, and no longer under its labels before."""
        labels = self._counts.labels(self._method, route, model)
        if self._counted:
            labels.in_flight.inc()
            if self._labels is not None:
                self._labels.in_flight.inc(-1)
        self._labels = labels

    def _line(self, text: str, fields: dict[str, Any]) -> None:
        path = self._path[:_SHOWN_PATH]
        known = {"method": self._method, "route": self.route or UNMATCHED, "path": path, **fields}
        log.info("%s %s %s %s", self.request_id, self._method, path, text, extra=known)
