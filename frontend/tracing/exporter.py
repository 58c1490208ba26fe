"""Ended requests become spans and go to the collector, in a thread with a bounded queue in front.

A full queue drops the newest request and counts the loss. If the collector does not answer, the spans of that attempt
are lost. Requests never wait. The spans of one request:

POST /v1/encode/{model}        server span, child of the caller's span if there was one
+-- prepare                    from the first tokenized item to the last
+-- queue                      from then, or from the first item that waited, to its first batch
+-- batch                      one for each batch of the request, linked to all traced requests of the batch
|   +-- device                 forward pass
|   +-- copy                   rows to their place in shared memory
+-- encode                     the body of the answer is made
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from frontend.tracing.tracer import Ended
from ipc.wire.messages import BatchTimes

log = logging.getLogger(__name__)

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


MAX_WAITING = 2048
"""Requests that wait for export."""
MAX_SENT = 128
"""Requests whose spans go into one export."""
GATHER_S = 0.5
CLOSE_S = 2.0

Send = Callable[[list[Span]], bool]


class Exporter:
    """Sends in a thread of its own; `count(outcome, requests)` with exported, failed or dropped."""

    def __init__(self, connect: Callable[[], Send], count: Callable[[str, int], Any]) -> None:
        """`connect` makes the sending function; it is called in the thread, since it imports a lot."""
        self._connect, self._count = connect, count
        self._waiting: deque[Ended] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Take one ended request, or drop and count the request while `MAX_WAITING` requests wait."""
        if len(self._waiting) >= MAX_WAITING:
            self._count("dropped", 1)
            return
        self._waiting.append(ended)
        if len(self._waiting) >= MAX_SENT:
            self._wake.set()

    def close(self) -> None:
        """Send the waiting requests, for at most `CLOSE_S`."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        send = self._connect()
        while True:
            self._wake.wait(GATHER_S)
            self._wake.clear()
            while self._waiting:
                self._export(send)
            if self._closing:
                return

    def _export(self, send: Send) -> None:
        ended = [self._waiting.popleft() for _ in range(min(MAX_SENT, len(self._waiting)))]
        try:
            sent = send([span for request in ended for span in spans_of(request)])
        except Exception:
            log.exception("%d traced requests could not be exported", len(ended))
            sent = False
        self._count("exported" if sent else "failed", len(ended))
        if sent is self._failing:
            self._failing = not sent
            log.warning(
                "spans are %s", "exported again" if sent else "not exported: the collector does not take them"
            )
