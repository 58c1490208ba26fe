"""Which requests are traced, and what is kept of each until it has ended.

1. `begin` decides (`sampling`): a valid `traceparent` brings its own sampled flag, a request without one is sampled by
   its trace id.
2. The request goes to the worker under the span's id, and the worker's times come back with the result.
3. `end` hands one record to the exporting thread. Spans are made there, not on the event loop.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple, Protocol

from frontend.engine.scope import RequestScope, ServerSpan
from frontend.tracing.sampling import Sampling

UNTRACED = frozenset({"/healthz", "/livez", "/readyz", "/health", "/metrics"})
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
        """Export what is left, within a bound."""


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
        """Export what is left; may take the exporter's bound, so call it in a thread."""
        self._sink.close()
