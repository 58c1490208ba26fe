"""Answers that the server gives itself, before or without the application, in the form of the protocol of their path.

The application says the form (`render_refusal`); one that says none gets the form of `plain`.
"""

from __future__ import annotations

import http
import random
from collections.abc import Callable

import orjson

from ipc import logs
from ipc.errors import Draining, HeadersTooLarge, InvalidInput, PenstockError, QueueFull, TooSlow

Rendered = tuple[int, bytes, dict[str, str]]
"""(status, body, headers) of an error."""
Render = Callable[[PenstockError, str], Rendered]
"""The form of an error on a path."""


def plain(error: PenstockError, path: str) -> Rendered:
    """The form of an application that has none of its own."""
    body = orjson.dumps({"detail": {"code": error.code, "message": error.message}})
    headers = {"Content-Type": "application/json", "X-SIE-Error-Code": error.code}
    if error.retry_after_s:
        headers["Retry-After"] = f"{error.retry_after_s:.0f}"
    return error.status, body, headers


def encode(error: PenstockError, path: str, render: Render, version: str) -> bytes:
    """The complete HTTP/1.1 response with `Connection: close`; `version` goes into X-SIE-Server-Version."""
    request_id = f"req_{random.getrandbits(128):032x}"
    token = logs.request_id.set(request_id)
    try:
        status, body, headers = render(error, path)
    finally:
        logs.request_id.reset(token)
    fields = {
        **{name.lower(): value for name, value in headers.items()},
        "content-length": str(len(body)),
        "connection": "close",
        "x-sie-server-version": version,
        "x-request-id": request_id,
        "x-trace-id": f"{random.getrandbits(128):032x}",
    }
    start = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"
    lines = [start, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


class RefusedRequest(Exception):
    """Raised inside a parser callback to end the parsing of a request that is not served."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error.message)
        self.error = error


def malformed(message: str) -> PenstockError:
    """400 for bytes that are not a valid HTTP/1 request."""
    return InvalidInput(message)


def head_too_large(limit_bytes: int) -> PenstockError:
    """431 for a request line and header fields (or framing of a chunked body) above `limit_bytes`."""
    return HeadersTooLarge(
        f"The request head is larger than {limit_bytes} bytes (server.max_header_bytes); gRPC has no such limit."
    )


def too_slow(rate_bytes_per_s: float, floor_bytes_per_s: int) -> PenstockError:
    """408 for a body that arrived at less than the floor."""
    return TooSlow(
        f"The body arrived at {rate_bytes_per_s:.0f} bytes/s; at least {floor_bytes_per_s} bytes/s are required."
    )


def too_many_connections(limit: int) -> PenstockError:
    """503 for a connection above the cap of this process."""
    return QueueFull(f"This process serves {limit} connections already.", retry_after_s=1)


def draining() -> PenstockError:
    """503 for a request that did not finish before the process had to end."""
    return Draining("Service shutting down", retry_after_s=5)
