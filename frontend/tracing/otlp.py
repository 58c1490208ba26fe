"""Plain spans to OTLP over HTTP, by OpenTelemetry's exporter. The extra `tracing` brings the libraries.

`start` makes the tracer of a frontend, if `tracing.endpoint` is set.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import socket
import stat
import urllib.parse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from frontend.tracing import otlp
from frontend.tracing.exporter import Exporter, Send, Span
from frontend.tracing.tracer import Tracer
from ipc import extras
from ipc.errors import ConfigError
from ipc.settings import Settings, Tracing
from ipc.version import VERSION

TIMEOUT_S = 5.0
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"
_HEADER = re.compile(r"^([A-Za-z0-9!#$%&'*+.^_`|~-]+)[ \t]*:[ \t]*([\x20-\x7e]+?)[ \t]*$")


def check(config: Tracing) -> None:
    """Raise `ConfigError` when tracing is on and its settings, its file of headers or its libraries are wrong."""
    if not config.endpoint:
        return
    url_of(config.endpoint)
    read_headers(config.headers_file)
    try:
        found = importlib.util.find_spec(f"{_EXPORTER}.trace_exporter")
    except ModuleNotFoundError:
        found = None
    if found is None:
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
        found = _HEADER.match(line)
        if found is None:
            raise ConfigError(f"tracing.headers_file: {file} line {number}: expected `Name: value` in ASCII")
        headers[found[1]] = found[2]
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
    return Tracer(Exporter(partial(otlp.connect, config, instance), count), config.sample_ratio)
