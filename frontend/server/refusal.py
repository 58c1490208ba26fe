"""Answers that the server gives itself, without the application: the same JSON shape as the application's errors."""

from __future__ import annotations

import http
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from ipc.errors import InvalidInput, QueueFull, TooSlow


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer after which the connection ends."""

    status: int
    code: str
    message: str
    retry_after_s: int = 0
    detail: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)

    def encode(self, version: str) -> bytes:
        """The complete HTTP/1.1 response with `Connection: close`; `version` goes into X-SIE-Server-Version."""
        detail = {"code": self.code, "message": self.message, **self.detail}
        body = json.dumps({**self.beside, "detail": detail}).encode()
        lines = [
            f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            f"x-sie-error-code: {self.code}",
            f"x-sie-server-version: {version}",
            f"x-request-id: req_{random.getrandbits(128):032x}",
            f"x-trace-id: {random.getrandbits(128):032x}",
        ]
        if self.retry_after_s:
            lines.append(f"retry-after: {self.retry_after_s}")
        return "\r\n".join([*lines, "", ""]).encode("ascii") + body


class RefusedRequest(Exception):
    """Raised inside a parser callback to end the parsing of a request that is not served."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def malformed(message: str) -> Refusal:
    """400 for bytes that are not a valid HTTP/1 request."""
    return Refusal(InvalidInput.status, InvalidInput.code, message)


def head_too_large(limit_bytes: int) -> Refusal:
    """431 for a request line and header fields (or framing of a chunked body) above `limit_bytes`."""
    message = f"The request head is larger than {limit_bytes} bytes (server.max_header_bytes); gRPC has no such limit."
    return Refusal(431, "HEADERS_TOO_LARGE", message)


def too_slow(rate_bytes_per_s: float, floor_bytes_per_s: int) -> Refusal:
    """408 for a body that arrived at less than the floor."""
    message = f"The body arrived at {rate_bytes_per_s:.0f} bytes/s; at least {floor_bytes_per_s} bytes/s are required."
    return Refusal(TooSlow.status, TooSlow.code, message)


def too_many_connections(limit: int) -> Refusal:
    """503 for a connection above the cap of this process."""
    message = f"This process serves {limit} connections already."
    return Refusal(QueueFull.status, QueueFull.code, message, retry_after_s=1)


def draining() -> Refusal:
    """503 for a request that did not finish before the process had to end."""
    return Refusal(
        QueueFull.status,
        QueueFull.code,
        "Service shutting down",
        retry_after_s=5,
        detail={"reason": "draining"},
        beside={"error": "Service shutting down"},
    )
