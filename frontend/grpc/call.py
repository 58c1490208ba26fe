"""One request over gRPC: an rpc, or one message of a stream. Its ids, its deadline, who asks, and how it ended.

1. `begin` makes the request's context from the metadata (`x-request-id`, `traceparent`) and the rpc's deadline.
2. The caller was let in when the rpc came (`frontend.grpc.accepting.Door`). A message of a stream counts against the
   rate of the key by itself.
3. `finish` counts the request, remembers it and closes its span, once.

A protocol brings to the gRPC server services (`GrpcService`), their methods (`Method`), and what each method answers.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from frontend.access.gate import Grant
from frontend.grpc.rpc import Metadata, Rpc
from frontend.records.finishing import Outcome
from frontend.route_rows import Need
from frontend.scope import RequestScope, current_scope, scope_of_ids
from frontend.services import Services
from ipc import deadline, logs
from ipc.errors import AccessRefused, PenstockError
from ipc.metrics.families import NO_KEY

log = logging.getLogger(__name__)
Answer = Message | bytes
"""A response: a message, or the bytes of a message."""


@dataclass(slots=True)
class Call:
    """A request under way. `path` is `/package.Service/Method`; `raw` are the values of `Method.raw_field`.

    `number` is the place of a message in its stream, from 1; 0: the rpc itself.
    `data` are the bytes of a small message, also after its parse.
    `scheduled` is set by contracts that number requests from there on. `ended`: the request has been counted.
    """

    services: Services
    rpc: Rpc
    protocol: str
    path: str
    context: RequestScope
    grant: Grant
    number: int = 0
    raw: Sequence[bytes | memoryview] = ()
    data: bytes = b""
    scheduled: bool = False
    ended: bool = False

    @classmethod
    def begin(
        cls, services: Services, rpc: Rpc, protocol: str, path: str, operation: str, number: int = 0
    ) -> Call:
        """Begin a request that has just arrived; `number` is its place in a stream, from 1."""
        metadata = rpc.metadata
        given, traceparent = metadata.get("x-request-id", ""), metadata.get("traceparent", "")
        if number and given:
            given = f"{given!s}/{number}"
        scope = scope_of_ids(str(given), str(traceparent), services.settings.limits)
        scope.host, scope.grant, scope.operation = rpc.host, rpc.grant, operation
        current_scope.set(scope)
        left_s = rpc.context.time_remaining()
        if left_s is not None:
            scope.deadline_ns = min(scope.deadline_ns, deadline.after(max(0.0, left_s)))
        logs.request_id.set(scope.request_id)
        logs.caller.set(rpc.grant.name)
        if operation:
            services.finisher.begin(scope, path)
        return cls(services, rpc, protocol, path, scope, rpc.grant, number)

    @property
    def metadata(self) -> Metadata:
        """The metadata of the rpc."""
        return self.rpc.metadata

    def admit(self, need: Need) -> None:
        """Let the caller in, who needs the scope `need`, as the request told. Raises an `AccessRefused`."""
        with self._counting_refusal():
            self.grant = self.context.grant = self.services.access.grant_for(self.rpc.head(), need)

    def spend(self) -> None:
        """Count a message of a stream against the rate of the caller's key. Raises `RateLimited`."""
        with self._counting_refusal():
            self.services.access.spend(self.grant)

    @contextmanager
    def _counting_refusal(self) -> Iterator[None]:
        try:
            yield
        except AccessRefused as error:
            self.services.recorder.refused(error.code.lower())
            raise

    def header(self, name: str) -> str | None:
        """A value of the metadata by its name in any case; None for one that is not there, or binary."""
        value = self.metadata.get(name.lower())
        return value if isinstance(value, str) else None

    def refuse(self, error: PenstockError) -> None:
        """Count a request that was refused by its head alone."""
        if isinstance(error, AccessRefused):
            self.services.recorder.refused(error.code.lower())
        self.finish(error)

    def finish(self, error: PenstockError | None = None) -> None:
        """The request has been answered, or has failed with `error`."""
        scope, self.ended = self.context, True
        status = 200 if error is None else error.status
        scope.error = ""
        if error is not None:
            scope.failed(error)
        if self.grant.name or isinstance(error, AccessRefused):
            self.services.recorder.called(self.grant.name or NO_KEY, str(status))
        if self.grant.admin and self.grant.name:
            log.info("%s answered %s for key %s", self.path, scope.error or "OK", self.grant.name)
        self.services.finisher.finish(scope, self.protocol, Outcome("", self.path, self.path[1:], status))

    def ended_early(self) -> PenstockError:
        """Why the rpc was cancelled: its deadline passed, or its client went away."""
        return self.context.ended_early()

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The request's ids, and the caller's traceparent, for the trailing metadata."""
        scope = self.context
        ids = (("x-request-id", scope.request_id), ("x-trace-id", scope.trace_id))
        return (*ids, ("traceparent", scope.parent)) if scope.parent else ids


Failed = Callable[[Call, Any, PenstockError], Answer | None]


def serialized(answer: Answer) -> bytes:
    """The bytes of a response."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


@dataclass(frozen=True, slots=True)
class Several:
    """The answers to one message of a stream, any number of them, made while the stream goes on with other messages.

    `last` follows all of them, and follows the message that tells a failure.
    """

    answers: AsyncGenerator[Answer, None]
    last: Answer | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """One method, unary or a stream in both directions, of which each message is a request.

    `answer` takes a call and its request, and gives the response or raises a `PenstockError`; it is cancelled with the
    rpc. `operation` names it in metrics and traces ("": neither, for probes). `need` is the scope that a key needs, or
    (not of streams) a function that tells the scope from the request: small requests are then parsed before the key is
    checked, and large ones need `admin`. `raw_field` is the number of the request's large bytes field: its values are
    in `Call.raw` then, and perhaps not in the request. `check` looks at the rest of a large request before it is
    parsed, and raises the first error; without `check` the fields of the request are counted.
    `failed` makes the response that says an error itself, where the contract has one; it gets None for a request that
    is no message. Without it, or where it gives None, the rpc ends with a gRPC status. `ordered` streams answer in the
    order of their requests, others as answers come; `Several` answers to one message are written as they come.
    `planned` answers a message as received, without parsing, by the plan of an earlier one; None without a plan.
    """

    answer: Callable[[Call, Any], Awaitable[Answer | Several]]
    operation: str = ""
    need: Need | Callable[[Any], Need] = "infer"
    raw_field: int = 0
    check: Callable[[bytes], None] | None = None
    failed: Failed | None = None
    ordered: bool = True
    planned: Callable[[Call, bytes], Awaitable[Answer] | None] | None = None


class GrpcService(Protocol):
    """One service of a protocol; `protocol` names it in metrics."""

    protocol: str
    descriptor: ServiceDescriptor

    @property
    def methods(self) -> Mapping[str, Method]:
        """Methods by name; the others of the descriptor answer UNIMPLEMENTED."""

    def message_of(self, error: PenstockError) -> str:
        """The words of the contract for an error."""
