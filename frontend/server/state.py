"""What all connections of a frontend share: limits, open files, accept queues, the server's own answers.

`connection_shares` divides the open files of a frontend: HTTP connections, gRPC connections, and all other files.

The other files are indispensable: sockets to workers, arenas, metric files, health checks. If the hard limit of the
process is too low for all connections that the settings allow, HTTP and gRPC get less, in proportion.

Answers that the server gives itself, before or without the application, have the form of the protocol of their path.
The application says the form (`render_refusal`); one that says none gets the form of `plain`.
"""

from __future__ import annotations

import contextlib
import http
import math
import os
import random
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from frontend.server.drain import Drain
from ipc import logs
from ipc.errors import Draining, HeadersTooLarge, InvalidInput, PenstockError, QueueFull, TooSlow

OTHERS = 512
_LEAST_SHARE = 2
"""Under a very low hard limit, other files get at most one part in so many."""
Rendered = tuple[int, bytes, dict[str, str]]
"""(status, body, headers) of an error."""
Render = Callable[[PenstockError, str], Rendered]
"""The form of an error on a path."""
_UNACKED = slice(24, 28)
"""Bytes of `tcpi_unacked` in `struct tcp_info` (linux/tcp.h)."""
_SLOWEST_SWEEP_S = 1.0
_FASTEST_SWEEP_S = 0.05


def files_for(connections: Sequence[int]) -> int:
    """Open files for these numbers of connections, and other files."""
    return sum(connections) + OTHERS


def connection_shares(connections: Sequence[int], limit: int) -> list[int]:
    """How many connections each may have under a limit of open files (negative: none), one at least."""
    if limit < 0 or files_for(connections) <= limit:
        return list(connections)
    free = limit - min(OTHERS, limit // _LEAST_SHARE)
    total = sum(connections)
    return [max(1, number * free // total) for number in connections]


def hard_limit() -> int:
    """The hard limit of open files; negative without one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return -1 if hard == resource.RLIM_INFINITY else hard


def raise_file_limit(number: int) -> None:
    """Raise the soft limit to so many, or as near as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))


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


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Deadlines and bounds of the HTTP server; all of them hold per process or per connection."""

    keepalive_s: float = 120.0
    """How long a connection may be idle between two requests."""
    graceful_timeout_s: float = 30.0
    """Time from SIGTERM to the end of the process, for requests in work, when the server stops."""
    stream_drain_s: float = 600.0
    """Time from SIGTERM in a reload until streams end with an error; `graceful_timeout_s` if that is longer."""
    drain_s: float = 2.0
    """How long an idle connection stays open after SIGTERM, so that its next request still gets an answer."""
    header_deadline_s: float = 10.0
    """From accept, or from the first byte of a further request, to the end of its head."""
    body_floor_bytes_per_s: int = 1024
    """Lowest average rate of a request body while the server reads it."""
    body_floor_after_s: float = 10.0
    """Reading time before the floor applies."""
    health_port: int = 0
    """The port of `server.health_bind`, which a server that stops answers as long as the process lives; 0: none."""
    max_connections: int = 10_000
    """Open connections per process; one more is answered 503."""
    max_grpc_connections: int = 0
    """Connections of the gRPC server in the same process, which take descriptors as well."""
    write_stall_s: float = 60.0
    """How long a client may take nothing of a response that waits for it."""
    max_header_bytes: int = 65_536
    """Request line and header fields of one request; also a chunked body's bytes between two pieces of content."""
    max_pipelined: int = 64
    """Requests that may wait on one connection behind the one in work."""
    version_header: str = "0.3.4"
    """Value of X-SIE-Server-Version on the server's own refusals."""
    linger_s: float = 1.0
    """How long the rest of a refused upload is read and thrown away, so that the client can read the refusal."""

    @property
    def sweep_interval_s(self) -> float:
        """Time between two looks at all connections: a tenth of the shortest deadline, 0.05 to 1 s."""
        shortest = min(
            self.keepalive_s,
            self.header_deadline_s,
            self.body_floor_after_s,
            self.write_stall_s,
            self.linger_s * 5,
        )
        return min(_SLOWEST_SWEEP_S, max(_FASTEST_SWEEP_S, shortest / 10))

    @property
    def answer_until_s(self) -> float:
        """Time from SIGTERM after which unanswered requests get 503, and streams an error, when the server stops."""
        return self.graceful_timeout_s - self.reserve_s

    @property
    def reserve_s(self) -> float:
        """Time that is left then, for the last events of streams and for the application's own shutdown."""
        return min(2.0, self.graceful_timeout_s / 3)


class FrontendState(ServerState):
    """uvicorn's shared state with the limits, the drain, and the form of the server's own answers."""

    def __init__(
        self, limits: ServerLimits, drain: Drain, render: Render, note_accepted: Callable[[], None]
    ) -> None:
        """`render` is the form of the answers that the server gives itself; each connection calls `note_accepted`."""
        super().__init__()
        self.render = render
        self.note_accepted = note_accepted
        self.limits = limits
        self.drain = drain
        self.lingering: set[HttpToolsProtocol] = set()
        """Connections that only wait for their client to hang up."""


def parent_holds(listener: socket.socket) -> bool:
    """Whether the arbiter listens on the same socket: in a reload others answer on it, in a stop it is closed there.

    True where that cannot be seen.
    """
    link = f"socket:[{os.fstat(listener.fileno()).st_ino}]"
    try:
        descriptors = list(Path(f"/proc/{os.getppid()}/fd").iterdir())
    except OSError:
        return True
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) == link:
                return True
    return False


def waiting_count(listener: socket.socket) -> int:
    """Connections in the accept queue, which Linux tells as `tcpi_unacked` of a listener; 0 if closed or no TCP."""
    try:
        return int.from_bytes(
            listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[_UNACKED], sys.byteorder
        )
    except OSError:
        return 0


def accept_waiting(listener: socket.socket, most: float = math.inf) -> list[socket.socket]:
    """Take up to `most` connections out of a non-blocking listener's queue; stop early when descriptors run out."""
    taken: list[socket.socket] = []
    while len(taken) < most:
        try:
            connection, _ = listener.accept()
        except ConnectionAbortedError:
            continue
        except OSError:
            break
        connection.setblocking(False)
        taken.append(connection)
    return taken
