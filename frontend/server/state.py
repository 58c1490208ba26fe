"""State that all connections of one frontend process share, and the limits of the process."""

from __future__ import annotations

from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from frontend.server.drain import Drain
from frontend.server.refusal import Render, plain

_SLOWEST_SWEEP_S = 1.0
_FASTEST_SWEEP_S = 0.05


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

    def __init__(self, limits: ServerLimits, drain: Drain, render: Render = plain) -> None:
        """`render` is the form of the answers that the server gives itself."""
        super().__init__()
        self.render = render
        self.limits = limits
        self.drain = drain
        self.lingering: set[HttpToolsProtocol] = set()
        """Connections that only wait for their client to hang up."""
