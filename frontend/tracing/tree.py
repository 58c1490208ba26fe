"""One ended request to its spans: the server span, and below it what the worker and the rendering did.

POST /v1/encode/{model}        server span, child of the caller's span if there was one
+-- prepare                    from the first tokenized item to the last
+-- queue                      from then, or from the first item that waited, to its first batch
+-- batch                      one for each batch the request took part in, linked to all traced requests in it
|   +-- device                 forward pass
|   +-- copy                   rows to their place in shared memory
+-- encode                     the body of the answer is made
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from frontend.tracing.tracer import Ended
from ipc.wire.messages import BatchTimes

Attributes = dict[str, str | int | float | bool]


class Span(NamedTuple):
    """One span in plain values: hexadecimal ids, instants in Unix nanoseconds, `links` as traceparents."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    server: bool = False
    failed: bool = False
    links: tuple[str, ...] = ()


def spans_of(ended: Ended) -> list[Span]:
    """All spans of a request, the server span first."""
    span = ended.span
    root = Span(
        f"{ended.method} {ended.route}".strip(),
        ended.trace_id,
        span.span_id,
        span.parent_id,
        span.began_ns + ended.clock_ns,
        ended.ended_ns + ended.clock_ns,
        _http_attributes(ended) if ended.method else _rpc_attributes(ended),
        server=True,
        failed=ended.status >= 500,
    )
    found = [root, *_worker_spans(ended)]
    if ended.encode_ms > 0:
        began_ns = max(span.began_ns, ended.ended_ns - round(ended.encode_ms * 1e6))
        found.append(_child(ended, "encode", began_ns, ended.ended_ns))
    return found


def _http_attributes(ended: Ended) -> Attributes:
    """Names by the HTTP semantic conventions of OpenTelemetry where they have one."""
    attributes: Attributes = {
        "http.request.method": ended.method,
        "http.response.status_code": ended.status,
        "url.path": ended.path,
    }
    route: Attributes = {"http.route": ended.route} if ended.route else {}
    return attributes | route | _request_attributes(ended)


def _rpc_attributes(ended: Ended) -> Attributes:
    """Names by the RPC semantic conventions."""
    service, _, method = ended.path.strip("/").partition("/")
    attributes: Attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    return attributes | _request_attributes(ended)


def _request_attributes(ended: Ended) -> Attributes:
    named = {
        "penstock.request_id": ended.request_id,
        "penstock.model": ended.model[:256],
        "penstock.operation": ended.operation,
        "error.type": ended.error,
    }
    return {name: value for name, value in named.items() if value}


def _worker_spans(ended: Ended) -> Iterator[Span]:
    trace = ended.span.trace
    if trace is None:
        return
    at: Attributes = {"penstock.worker": f"worker-{ended.span.worker}"}
    if trace.prepare_ended_ns:
        yield _child(ended, "prepare", trace.prepare_began_ns, trace.prepare_ended_ns, attributes=at)
    if trace.queued_ns and trace.batches:
        until = max(trace.queued_ns, trace.batches[0].began_ns)
        yield _child(ended, "queue", trace.queued_ns, until, attributes=at)
    for batch in trace.batches:
        yield from _batch_spans(ended, batch, at)


def _batch_spans(ended: Ended, batch: BatchTimes, at: Attributes) -> Iterator[Span]:
    told: Attributes = {
        "penstock.batch.items": batch.items,
        "penstock.batch.tokens": batch.tokens,
        "penstock.batch.requests": batch.requests,
    }
    whole = _child(ended, "batch", batch.began_ns, batch.copied_ns, attributes=at | told)
    yield whole._replace(links=tuple(batch.members))
    yield _child(ended, "device", batch.began_ns, batch.computed_ns, whole.span_id, at)
    yield _child(ended, "copy", batch.computed_ns, batch.copied_ns, whole.span_id, at)


def _child(
    ended: Ended,
    name: str,
    began_ns: int,
    ended_ns: int,
    parent_id: str = "",
    attributes: Attributes | None = None,
) -> Span:
    return Span(
        name,
        ended.trace_id,
        f"{random.getrandbits(64) or 1:016x}",
        parent_id or ended.span.span_id,
        began_ns + ended.clock_ns,
        ended_ns + ended.clock_ns,
        attributes or {},
    )
