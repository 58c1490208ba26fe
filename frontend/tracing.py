"""Chooses the requests to trace, and sends their spans as OTLP over HTTP. The extra `tracing` brings the libraries.

1. `begin` decides: by the sampled flag of a valid `traceparent`, otherwise by the share of trace ids (`Sampling`).
2. The request goes to the worker under the span's id, and the worker's times come back with the result.
3. `end` hands one record to the exporting thread, which makes the spans.

A model may have a share of its own. The model is unknown when a request begins: there the largest share decides. The
share of the model decides when the request ends.

`start` makes the tracer of a frontend, if `tracing.endpoint` is set.

The `Exporter` takes ended requests: they become spans and go to the collector, in a thread with a bounded queue in
front.

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

import importlib.util
import logging
import random
import re
import socket
import stat
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from frontend.scope import RequestScope, ServerSpan
from ipc import extras
from ipc.catalog.ids import split_id
from ipc.errors import ConfigError
from ipc.settings import Settings, Tracing
from ipc.version import VERSION
from ipc.wire.messages import BatchTimes

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


log = logging.getLogger(__name__)

Attributes = dict[str, str | int | float | bool]
MAX_WAITING = 2048
"""Requests that wait for export."""
MAX_SENT = 128
"""Requests whose spans go into one export."""
GATHER_S = 0.5
CLOSE_S = 2.0
TIMEOUT_S = 5.0
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_HEADER = re.compile(r"^([A-Za-z0-9!#$%&'*+.^_`|~-]+)[ \t]*:[ \t]*([\x20-\x7e]+?)[ \t]*$")


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
    spans = [root, *_worker_spans(ended)]
    if ended.encode_ms > 0:
        began_ns = max(span.began_ns, ended.ended_ns - round(ended.encode_ms * 1e6))
        spans.append(_child(ended, "encode", began_ns - span.began_ns, ended.ended_ns - span.began_ns))
    return spans


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
    at: Attributes = {"penstock.worker": ended.span.worker}
    if trace.prepare_ended_ns:
        yield _child(ended, "prepare", trace.prepare_began_ns, trace.prepare_ended_ns, attributes=at)
    if trace.queued_ns and trace.batches:
        until = max(trace.queued_ns, trace.batches[0].began_ns)
        yield _child(ended, "queue", trace.queued_ns, until, attributes=at)
    for batch in trace.batches:
        yield from _batch_spans(ended, batch, at)


def _batch_spans(ended: Ended, batch: BatchTimes, at: Attributes) -> Iterator[Span]:
    attributes: Attributes = {
        "penstock.batch.items": batch.items,
        "penstock.batch.tokens": batch.tokens,
        "penstock.batch.requests": batch.requests,
    }
    whole = _child(ended, "batch", batch.began_ns, batch.copied_ns, attributes=at | attributes)
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
    """A span below the request's; its times are nanoseconds after the beginning of the request."""
    unix_ns = ended.span.began_ns + ended.clock_ns
    return Span(
        name,
        ended.trace_id,
        f"{random.getrandbits(64) or 1:016x}",
        parent_id or ended.span.span_id,
        began_ns + unix_ns,
        ended_ns + unix_ns,
        attributes or {},
    )


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


def check(config: Tracing) -> None:
    """Raise `ConfigError` when tracing is on and its settings, its file of headers or its libraries are wrong."""
    if not config.endpoint:
        return
    url_of(config.endpoint)
    read_headers(config.headers_file)
    try:
        exporter = importlib.util.find_spec(f"{_EXPORTER}.trace_exporter")
    except ModuleNotFoundError:
        exporter = None
    if exporter is None:
        raise ConfigError(f"tracing.endpoint needs {extras.needed('tracing')}")


def url_of(endpoint: str) -> str:
    """Where spans are posted: the endpoint, with `/v1/traces` when it names no path. Raises `ConfigError`."""
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"tracing.endpoint: {endpoint[:128]!r} is not an http or https URL")
    if parts.username or parts.password:
        raise ConfigError("tracing.endpoint: no credentials in the URL; use tracing.headers_file")
    return endpoint if parts.path.strip("/") else urllib.parse.urlunsplit(parts._replace(path="/v1/traces"))


def read_headers(file: str) -> dict[str, str]:
    """Headers of a file with one `Name: value` per line; none for an empty name.

    Raises `ConfigError` when the file cannot be read, may be read by all users, or has another form.
    """
    if not file:
        return {}
    path = Path(file)
    try:
        if path.stat().st_mode & stat.S_IROTH:
            raise ConfigError(f"tracing.headers_file: all users may read {file}; chmod o-r")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tracing.headers_file: {file} cannot be read: {type(error).__name__}") from error
    headers = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _HEADER.match(line)
        if match is None:
            raise ConfigError(f"tracing.headers_file: {file} line {number}: expected `Name: value` in ASCII")
        headers[match[1]] = match[2]
    return headers


def connect(config: Tracing, instance: str) -> Send:
    """A function that sends spans and returns whether the collector took them; `instance` names this process."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    # NOTE: the library logs every attempt; this server says once that exports fail, and counts them.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = OTLPSpanExporter(
        url_of(config.endpoint), headers=read_headers(config.headers_file), timeout=TIMEOUT_S
    )
    resource = Resource.create(
        {"service.name": config.service_name, "service.version": VERSION, "service.instance.id": instance}
    )
    scope, sampled = InstrumentationScope("penstock", VERSION), TraceFlags(TraceFlags.SAMPLED)

    def context_of(trace_id: str, span_id: str, is_remote: bool = False) -> SpanContext:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, sampled)

    def linked(traceparent: str) -> Link:
        _, trace_id, span_id, _ = traceparent.split("-")
        return Link(context_of(trace_id, span_id))

    def readable(span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context_of(span.trace_id, span.span_id),
            context_of(span.trace_id, span.parent_id, span.server) if span.parent_id else None,
            resource,
            span.attributes,
            links=[linked(traceparent) for traceparent in span.links],
            kind=SpanKind.SERVER if span.server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    def send(spans: list[Span]) -> bool:
        return exporter.export([readable(span) for span in spans]) is SpanExportResult.SUCCESS

    return send


def start(settings: Settings, process: str, count: Callable[[str, int], Any]) -> Tracer | None:
    """The tracer of `process` (`frontend-0`), or None when `tracing.endpoint` is empty."""
    config = settings.tracing
    if not config.endpoint:
        return None
    instance = f"{socket.gethostname()}/{settings.instance}/{process}"
    return Tracer(Exporter(partial(connect, config, instance), count), config.sample_ratio)
