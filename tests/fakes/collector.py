"""An OTLP/HTTP collector: takes exports of spans, decodes the protobuf, and keeps the spans in plain values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class SeenSpan:
    """One received span; ids in hexadecimal, instants in Unix nanoseconds, `kind` and `status` by name."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: str
    status: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: frozenset[tuple[str, str]]


@dataclass
class Collector:
    """What arrived so far; `answer` is the status of the next answers."""

    url: str
    answer: int = 200
    spans: list[SeenSpan] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)

    def of(self, trace_id: str) -> list[SeenSpan]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def server_span(self, trace_id: str) -> SeenSpan | None:
        """The server span of a trace, once it has arrived."""
        return next((span for span in self.of(trace_id) if span.kind == "SPAN_KIND_SERVER"), None)

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        """Decode one export."""
        self.requests.append(headers)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_seen(span, resource) for span in scope.spans]


def _plain(attributes: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}


def _seen(span: Any, resource: dict[str, Any]) -> SeenSpan:
    return SeenSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.SpanKind.Name(span.kind),
        span.status.StatusCode.Name(span.status.code),
        _plain(span.attributes),
        resource,
        frozenset((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.answer == 200:
                collector.take(
                    body, {"path": self.path} | {name.lower(): value for name, value in self.headers.items()}
                )
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.answer)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
