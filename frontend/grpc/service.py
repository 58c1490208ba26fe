"""What a protocol brings to the gRPC server: services, their methods, and what each method answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from frontend.access.scopes import Need
from frontend.grpc.call import Call
from ipc.errors import PenstockError

Answer = Message | bytes
"""A response, or one that is serialized already."""
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
    rpc. `operation` names it in metrics and traces ("": neither, for probes). `need` is the scope that it needs, or
    tells it from the request, which is parsed before the key is checked then; a large one needs `admin` (not of
    streams). `raw_field` is the number of the request's large bytes field: its values are in `Call.raw` then, and
    perhaps not in the request. `check` looks at the rest of a large request before it is parsed, and raises what is
    wrong with it; without one its fields are counted.
    `failed` makes the response that says an error itself, where the contract has one; it gets None for a request that
    is no message. Without it, or where it gives None, the rpc ends with a gRPC status. `ordered` streams answer in the
    order of their requests, others as answers come; `Several` answers to one message are written as they come.
    `repeated` answers a message as received, without parsing, if it is like an earlier one; None for any other.
    """

    answer: Callable[[Call, Any], Awaitable[Answer | Several]]
    operation: str = ""
    need: Need | Callable[[Any], Need] = "infer"
    raw_field: int = 0
    check: Callable[[bytes], None] | None = None
    failed: Failed | None = None
    ordered: bool = True
    repeated: Callable[[Call, bytes], Awaitable[Answer] | None] | None = None


class GrpcService(Protocol):
    """One service of a protocol; `protocol` names it in metrics."""

    protocol: str
    descriptor: ServiceDescriptor

    @property
    def methods(self) -> Mapping[str, Method]:
        """Methods by name; the others of the descriptor answer UNIMPLEMENTED."""

    def message_of(self, error: PenstockError) -> str:
        """The words of the contract for an error."""
