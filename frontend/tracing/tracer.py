"""Chooses the requests to trace, and keeps the server span of each until the request ends.

1. `begin` decides: by the sampled flag of a valid `traceparent`, otherwise by the share of trace ids (`Sampling`).
2. The request goes to the worker under the span's id, and the worker's times come back with the result.
3. `end` hands one record to the exporting thread, which makes the spans.

A model may have a share of its own. The model is unknown when a request begins: there the largest share decides. The
share of the model decides when the request ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from frontend.scope import RequestScope, ServerSpan
from ipc.catalog.ids import split_id

_ALL = 1 << 64


class Sampling:
    """The shares in force, 0 to 1; None: no request at all, not even with a sampled `traceparent`."""

    def __init__(self, share: float | None) -> None:
        self.choose(share, {})

    def choose(self, share: float | None, by_model: Mapping[str, float | None]) -> None:
        """Trace these shares from now on."""
        self._bound = _bound_of(share)
        self._by_model = {model: _bound_of(own) for model, own in by_model.items()}
        self._most = max(self._bound, *self._by_model.values()) if self._by_model else self._bound

    def begins(self, trace_id: str, parent: str) -> bool:
        """Whether a request may be traced, before its model is known."""
        return _within(self._most, trace_id, parent)

    def keeps(self, trace_id: str, parent: str, model: str) -> bool:
        """Whether an ended request is exported; `model` is its catalog id."""
        return not self._by_model or _within(
            self._by_model.get(split_id(model)[0], self._bound), trace_id, parent
        )


def _bound_of(share: float | None) -> int:
    return -1 if share is None else round(share * _ALL)


def _within(bound: int, trace_id: str, parent: str) -> bool:
    if parent:
        return bound >= 0 and bool(int(parent[-2:], 16) & 1)
    # The lower half of the trace id decides, as in OpenTelemetry's TraceIdRatioBased.
    return int(trace_id[16:], 16) < bound


UNTRACED = frozenset({"/healthz", "/livez", "/readyz", "/ping", "/health", "/metrics"})
"""Paths that machines ask for every few seconds."""
MAX_PATH_CHARACTERS = 256


class Ended(NamedTuple):
    """One traced request that has been answered; `clock_ns` turns its monotonic instants into Unix time."""

    span: ServerSpan
    trace_id: str
    ended_ns: int
    clock_ns: int
    method: str
    path: str
    route: str
    status: int
    request_id: str
    model: str
    operation: str
    error: str
    encode_ms: float


class Sink(Protocol):
    """Takes ended requests and never blocks."""

    def put(self, ended: Ended) -> None:
        """Take one, or drop and count it."""

    def close(self) -> None:
        """Export the waiting requests, within a bound of time."""


class Tracer:
    """Opens and closes the server span of each traced request of this frontend."""

    def __init__(self, sink: Sink, sample_ratio: float) -> None:
        self._sink = sink
        self.sampling = Sampling(sample_ratio)

    def begin(self, context: RequestScope, path: str) -> None:
        """Open the span of a request if it is sampled, and give the request its id to carry on."""
        if path in UNTRACED:
            return
        if self.sampling.begins(context.trace_id, context.parent):
            parent_id = context.parent[36:52] if context.parent else ""
            span = ServerSpan(f"{random.getrandbits(64) or 1:016x}", parent_id, time.monotonic_ns())
            context.span = span
            context.traceparent = f"00-{context.trace_id}-{span.span_id}-01"

    def end(self, context: RequestScope, method: str, path: str, route: str, status: int) -> None:
        """Close the span of a request, if it has one; `method` is empty for an rpc."""
        span, context.span = context.span, None
        if span is None or not self.sampling.keeps(context.trace_id, context.parent, context.model):
            return
        now = time.monotonic_ns()
        self._sink.put(
            Ended(
                span,
                context.trace_id,
                now,
                time.time_ns() - now,
                method,
                path[:MAX_PATH_CHARACTERS],
                route,
                status,
                context.request_id,
                context.model,
                context.operation,
                context.error,
                context.phases.get("encode", 0.0),
            )
        )

    def close(self) -> None:
        """Export the waiting requests; call in a thread, since this may take as long as the exporter allows."""
        self._sink.close()
