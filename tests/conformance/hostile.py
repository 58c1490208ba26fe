"""Sending broken requests to a server that must get through them unharmed."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import msgpack

from tests.conformance.wire import Form
from tests.harness.server import Answer, Server

PATH = "/v1/encode/fake/echo"
MAX_BODY_BYTES = 110_000_000
MAX_IMAGE_BYTES = 4 << 20
MAX_GROWTH_BYTES = 64 << 20
QUICK_S = 30.0
LARGE_S = 60.0


def private_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; the arena, which is shared, does not count."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def send(server: Server, form: Form, body: bytes, path: str = PATH, within_s: float = QUICK_S) -> Answer:
    """POST raw bytes as `form`; the answer must come in time."""
    began = time.monotonic()
    answer = server.request("POST", path, body, form.headers, timeout_s=within_s + 20)
    assert time.monotonic() - began < within_s
    return answer


def with_field(value: bytes, field: str = "unknown") -> tuple[bytes, bytes]:
    """A good request with one more top-level field, whose JSON or msgpack value is `value`: (JSON, msgpack)."""
    return (
        b'{"items":[{"text":"a"}],"' + field.encode() + b'":' + value + b"}",
        b"\x82\xa5items\x91\x81\xa4text\xa1a" + msgpack.packb(field) + value,
    )


def exchange(server: Server, sent: bytes, timeout_s: float) -> bytes:
    """Send raw bytes and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout_s) as connection:
        connection.sendall(sent)
        return receive_all(connection)


def receive_all(connection: socket.socket) -> bytes:
    """Everything until the end of the connection; a reset after the answer ends it too."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    return found
