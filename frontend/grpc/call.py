"""One request over gRPC: an rpc, or one message of a stream. Its ids, its deadline, who asks, and how it ended.

1. `begin` makes the request's context from the metadata (`x-request-id`, `traceparent`) and the rpc's deadline.
2. `admit` asks the gate, which knows HTTP: the metadata of an rpc is given to it as the head of a request.
3. `finish` counts the request, remembers it and closes its span, once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from frontend.access.gate import ANONYMOUS, Grant
from frontend.access.scopes import Need
from frontend.engine.finishing import Outcome
from frontend.engine.scope import RequestScope, current_scope, scope_of_ids
from frontend.grpc.connections import Peer, host_of
from frontend.services import Services
from ipc import deadline, logs
from ipc.errors import AccessRefused, PenstockError
from ipc.metrics.families import NO_KEY

log = logging.getLogger(__name__)

Metadata = dict[str, str | bytes]


@dataclass(slots=True)
class Call:
    """A request under way. `path` is `/package.Service/Method`; `raw` are the values of `Method.raw_field`.

    `scheduled` is set by contracts that number requests from there on. `ended`: the request has been counted.
    """

    services: Services
    rpc: aio.ServicerContext[Any, Any]
    protocol: str
    path: str
    metadata: Metadata
    context: RequestScope
    grant: Grant = ANONYMOUS
    raw: Sequence[bytes | memoryview] = field(default=())
    scheduled: bool = False
    ended: bool = False

    @classmethod
    def begin(
        cls,
        services: Services,
        rpc: aio.ServicerContext[Any, Any],
        protocol: str,
        path: str,
        operation: str,
        number: int = 0,
    ) -> Call:
        """A request that has just arrived; `number` is its place in a stream, from 1."""
        metadata: Metadata = dict(rpc.invocation_metadata() or ())
        given, traceparent = metadata.get("x-request-id", ""), metadata.get("traceparent", "")
        if number and given:
            given = f"{given!s}/{number}"
        made = scope_of_ids(str(given), str(traceparent), services.settings.limits)
        made.host = host_of(Peer.named(rpc.peer()))
        current_scope.set(made)
        left_s = rpc.time_remaining()
        if left_s is not None:
            made.deadline_ns = min(made.deadline_ns, deadline.after(max(0.0, left_s)))
        made.operation = operation
        logs.request_id.set(made.request_id)
        if operation:
            services.finisher.begin(made, path)
        return cls(services, rpc, protocol, path, metadata, made)

    def admit(self, need: Need, spend: bool = True) -> None:
        """Let the caller in, who may need a key with the scope `need`, and count it. Raises an `AccessRefused`."""
        services = self.services
        try:
            scope = head_of(self.path, self.metadata, self.rpc.peer())
            self.grant = self.context.grant = services.access.grant_for(scope, need, spend)
        except AccessRefused as error:
            services.recorder.refused(error.code.lower())
            raise
        logs.caller.set(self.grant.name)

    def header(self, name: str) -> str | None:
        """A value of the metadata by its name in any case; None for one that is not there, or binary."""
        value = self.metadata.get(name.lower())
        return value if isinstance(value, str) else None

    def refuse(self, error: PenstockError) -> None:
        """The request is refused by its head alone: count it."""
        if isinstance(error, AccessRefused):
            self.services.recorder.refused(error.code.lower())
        self.finish(error)

    def finish(self, error: PenstockError | None = None) -> None:
        """The request has been answered, or has failed with `error`."""
        made, self.ended = self.context, True
        status = 200 if error is None else error.status
        made.error = "" if error is None else error.code
        if self.grant.name or isinstance(error, AccessRefused):
            self.services.recorder.called(self.grant.name or NO_KEY, str(status))
        if self.grant.admin and self.grant.name:
            log.info("%s answered %s for key %s", self.path, made.error or "OK", self.grant.name)
        self.services.finisher.finish(made, self.protocol, Outcome("", self.path, self.path[1:], status))

    def ended_early(self) -> PenstockError:
        """Why the rpc was cancelled: its deadline passed, or its client went away."""
        return self.context.ended_early()

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The request's ids, and the caller's traceparent, for the trailing metadata."""
        made = self.context
        ids = (("x-request-id", made.request_id), ("x-trace-id", made.trace_id))
        return (*ids, ("traceparent", made.parent)) if made.parent else ids


def head_of(path: str, metadata: Metadata, peer: str) -> dict[str, Any]:
    """An rpc as the gate, which knows HTTP, reads the head of a request."""
    # NOTE: gRPC keeps the fields of HTTP to itself, `:authority` too.
    headers = [(b"content-type", b"application/grpc")]
    for name, value in metadata.items():
        headers.append((name.encode(), value if isinstance(value, bytes) else value.encode("utf-8")))
    named = Peer.named(peer)
    unnamed = None if peer.startswith("unix:") else ("unknown", 0)
    client = named if named.address else unnamed
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": client}
