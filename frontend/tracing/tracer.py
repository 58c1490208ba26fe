"""Which requests are traced, and what is kept of each until it has ended.

1. `begin` decides: a valid `traceparent` brings its own sampled flag, a request without one is sampled by its trace id.
2. The request goes to the worker under the span's id, and the worker's times come back with the result.
3. `end` hands one record to the exporting thread. Spans are made there, not on the event loop.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from falcon.asgi import Request, Response

from frontend.context import RequestContext
from ipc.messages import Trace

UNTRACED = frozenset({"/healthz", "/livez", "/readyz", "/health", "/metrics"})
"""Paths that machines ask for every few seconds."""
MAX_PATH_CHARACTERS = 256


@dataclass(slots=True)
class ServerSpan:
    """The open span of one request: hexadecimal ids, start in CLOCK_MONOTONIC nanoseconds, and where it ran."""

    span_id: str
    parent_id: str
    began_ns: int
    worker: int = -1
    trace: Trace | None = field(default=None)


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
        self._bound = round(sample_ratio * (1 << 64))

    def begin(self, context: RequestContext, path: str) -> None:
        """Open the span of a request if it is sampled, and give the request its id to carry on."""
        if path in UNTRACED:
            return
        if context.parent:
            sampled = bool(int(context.parent[-2:], 16) & 1)
        else:
            # The lower half of the trace id decides, as in OpenTelemetry's TraceIdRatioBased.
            sampled = int(context.trace_id[16:], 16) < self._bound
        if sampled:
            parent_id = context.parent[36:52] if context.parent else ""
            span = ServerSpan(f"{random.getrandbits(64) or 1:016x}", parent_id, time.monotonic_ns())
            context.span = span
            context.traceparent = f"00-{context.trace_id}-{span.span_id}-01"

    def end(self, context: RequestContext, req: Request, resp: Response) -> None:
        """Close the span of a request, if it has one."""
        span, context.span = context.span, None
        if span is None:
            return
        now = time.monotonic_ns()
        self._sink.put(
            Ended(
                span,
                context.trace_id,
                now,
                time.time_ns() - now,
                req.method,
                req.path[:MAX_PATH_CHARACTERS],
                req.uri_template or "",
                resp.status_code,
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
