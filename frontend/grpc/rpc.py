"""One rpc: its head, its reply, and the way of a unary rpc from its message to its end, by operations of gRPC's core.

grpc.aio serves each rpc by two tasks and four rounds through its queue of events. A unary rpc here has one task, from
its message to its reply, and most have three rounds (ADR 46):

1. Receive the message, which has a limit of time.
2. Run the method in a task, which gives the `Reply`.
3. Send the reply, and wait for the end of the call in the same operation.

Few rpcs take longer than `LOOK_S`. `Looks` finds those: from then on gRPC tells at once when the client leaves or the
deadline passes, which cancels the task; the missing message has a limit; and an answer that the client does not take is
counted. gRPC's core ends a call, and drops what it has not sent, when nothing refers to the call any more (`cut_off`).

Errors of `ipc.errors` become gRPC statuses; code, retryable and retry-after travel in the trailing metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

from grpc import StatusCode
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from frontend.access.gate import ANONYMOUS, Grant
from frontend.grpc.connections import Peer, host_of
from frontend.http.bodies import Places
from ipc.errors import PenstockError

log = logging.getLogger(__name__)

_STATUS = {
    "CANCELLED": StatusCode.CANCELLED,
    "CONTROL_DISABLED": StatusCode.UNAVAILABLE,
    "BODY_TOO_LARGE": StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE_EXCEEDED": StatusCode.DEADLINE_EXCEEDED,
    "DEPENDENCY_CONFLICT": StatusCode.FAILED_PRECONDITION,
    "DRAINING": StatusCode.UNAVAILABLE,
    "FORBIDDEN": StatusCode.PERMISSION_DENIED,
    "INPUT_TOO_LONG": StatusCode.INVALID_ARGUMENT,
    "INVALID_INPUT": StatusCode.INVALID_ARGUMENT,
    "LEASE_REVOKED": StatusCode.UNAVAILABLE,
    "LORA_LOADING": StatusCode.UNAVAILABLE,
    "MODEL_LOADING": StatusCode.UNAVAILABLE,
    "MODEL_LOAD_FAILED": StatusCode.NOT_FOUND,
    "MODEL_NOT_FOUND": StatusCode.NOT_FOUND,
    "MODEL_NOT_LOADED": StatusCode.NOT_FOUND,
    "NO_REPLICA": StatusCode.UNAVAILABLE,
    "PROVISIONING": StatusCode.UNAVAILABLE,
    "QUEUE_FULL": StatusCode.UNAVAILABLE,
    "QUEUE_UNAVAILABLE": StatusCode.UNAVAILABLE,
    "RATE_LIMITED": StatusCode.RESOURCE_EXHAUSTED,
    "REGION_EXISTS": StatusCode.ALREADY_EXISTS,
    "REGION_NOT_FOUND": StatusCode.NOT_FOUND,
    "RESOURCE_EXHAUSTED": StatusCode.FAILED_PRECONDITION,
    "SANDBOX_FAILED": StatusCode.UNAVAILABLE,
    "SEQUENCE_LOST": StatusCode.UNAVAILABLE,
    "SEQUENCE_UNKNOWN": StatusCode.INVALID_ARGUMENT,
    "SERVICE_NOT_FOUND": StatusCode.NOT_FOUND,
    "SHM_EXHAUSTED": StatusCode.RESOURCE_EXHAUSTED,
    "TOOLS_UNAVAILABLE": StatusCode.UNAVAILABLE,
    "TOOL_HOST_LOST": StatusCode.UNAVAILABLE,
    "TOO_SLOW": StatusCode.RESOURCE_EXHAUSTED,
    "UNAUTHENTICATED": StatusCode.UNAUTHENTICATED,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
    "WORKER_LOST": StatusCode.UNAVAILABLE,
}
_MAX_MESSAGE_CHARACTERS = 1024
"""Most characters of an error's message, which travels in a header, percent-encoded: peers accept 8 KiB of headers."""
LAST_WORD_S = 1.0
"""Seconds that a client may take to read a status without a message."""
LOOK_S = 0.025
"""An rpc that has lasted so long is looked at, at the latest after twice that time."""
_NO_FLAGS = 0
Metadata = dict[str, str | bytes]
Trailers = tuple[tuple[str, str], ...]


def status_of(error: PenstockError) -> StatusCode:
    """The gRPC status of an error; INTERNAL for faults of the server."""
    status = _STATUS.get(error.code, StatusCode.INTERNAL)
    if status is StatusCode.DEADLINE_EXCEEDED and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        # A timeout that the request itself states, unlike the deadline of the rpc.
        return StatusCode.UNAVAILABLE
    return status


def shortened(message: str) -> str:
    """A message that fits into a header, in letters that UTF-8 has: gRPC refuses lone surrogates."""
    message = message.encode(errors="backslashreplace").decode()
    if len(message) <= _MAX_MESSAGE_CHARACTERS:
        return message
    return message[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


def trailers(error: PenstockError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata: the stable code, whether to try again, and after how many seconds."""
    fields = (
        ("penstock-code", error.code),
        ("penstock-retryable", str(error.retryable).lower()),
    )
    if not error.retryable:
        return fields
    return (*fields, ("retry-after", error.retry_after()))


class Reply(NamedTuple):
    """The end of an rpc: a message, or none beside a status that is not OK."""

    message: bytes | None
    trailers: Trailers = ()
    status: StatusCode = StatusCode.OK
    details: str = ""


FAULT = Reply(None, (), StatusCode.INTERNAL, "internal error")
"""The reply of a method that has a fault."""


class Rpc:
    """One rpc as it arrived. `path` is `/package.Service/Method`; `context` is grpc.aio's, with which streams speak.

    `grant` and `places` are set when the rpc is let in (`accepting.Door`); `account` is the id of the key that it
    counts for, or else an address.
    """

    __slots__ = (
        "account",
        "context",
        "cut_off",
        "grant",
        "host",
        "metadata",
        "path",
        "peer",
        "peer_name",
        "places",
    )

    def __init__(self, path: str, context: Any) -> None:
        self.path, self.context = path, context
        self.metadata: Metadata = dict(context.invocation_metadata() or ())
        self.peer_name: str = context.peer()
        self.peer = Peer.named(self.peer_name)
        self.host = self.account = host_of(self.peer)
        self.grant: Grant = ANONYMOUS
        self.places: Places | None = None
        self.cut_off: Callable[[], None] = _nothing
        """Ends the rpc at once, and frees the answers that its client has not taken."""

    def head(self) -> dict[str, Any]:
        """The rpc as the gate reads it."""
        return head_of(self.path, self.metadata, self.peer_name)


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


def _nothing() -> None:
    """Do nothing: the end of an rpc that is not served yet."""


class Untaken(Protocol):
    """An answer that its client has not taken yet."""

    def end(self) -> None:
        """The answer was taken, or its rpc has ended."""


class UnaryMethod(Protocol):
    """What answers the rpcs of one unary method."""

    path: str

    async def run(self, data: bytes, rpc: Rpc) -> Reply:
        """The reply to a message. Cancelled when the client leaves, or the deadline passes."""

    def untaken(self, nbytes: int, drop: Callable[[], None]) -> Untaken:
        """Count an answer that waits for its client; `drop` ends the rpc."""


class Batch:
    """Operations that gRPC's core carries out, without a task that waits; `ended` is called with their success."""

    __slots__ = ("_ended", "_operations", "_running")

    def __init__(self, call: Any, operations: tuple[Any, ...], ended: Callable[[bool], None]) -> None:
        loop = asyncio.get_running_loop()
        # NOTE: the core writes into operations until it is done, so this object, which the future keeps, keeps them.
        self._operations = operations
        self._ended: Callable[[bool], None] | None = ended
        self._running = cygrpc.execute_batch(call, operations, loop)
        try:
            future = self._running.send(None)
        except cygrpc.ExecuteBatchError:
            loop.call_soon(ended, False)
        else:
            future.add_done_callback(self._complete)

    def drop(self) -> None:
        """Refer to the call no more, and do not call `ended`."""
        self._ended = None
        self._running.close()

    def _complete(self, future: asyncio.Future[None]) -> None:
        ended, succeeded = self._ended, future.exception() is None
        # NOTE: an error refers to this frame, so this frame must not refer to the holder of the error.
        del future
        if ended is None:
            return
        try:
            self._running.send(None)
        except (StopIteration, cygrpc.ExecuteBatchError):
            ended(succeeded)


class Underway:
    """The unary rpcs of a server that are under way; `leave` is called with each at its end.

    Looks at each rpc that lasts longer than `LOOK_S`, all of them with one timer. PERF: a timer and an operation of
    gRPC's core for each rpc would cost more than most of them need otherwise.
    """

    def __init__(self, leave: Callable[[Rpc], None]) -> None:
        self.leave = leave
        self.stopped = False
        """Whether the server has ended: after its end no operation of gRPC's core may begin."""
        self.running: set[ServedUnary] = set()
        self._fresh: dict[ServedUnary, None] = {}
        self._older: dict[ServedUnary, None] = {}
        self._looking = False

    def look_later(self, served: ServedUnary) -> None:
        """Look at the rpc once, unless it ends soon."""
        self._fresh[served] = None
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def end(self, served: ServedUnary) -> None:
        """Forget an rpc that has ended."""
        self.running.discard(served)
        self._fresh.pop(served, None)
        self._older.pop(served, None)
        self.leave(served.rpc)

    def _look(self) -> None:
        older, self._older, self._fresh = self._older, self._fresh, {}
        self._looking = bool(self._older)
        if self._looking:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)
        for served in older:
            served.look()


class ServedUnary:
    """A unary rpc that was let in, or a refused rpc of any kind."""

    __slots__ = (
        "_batch", "_call", "_close", "_closing", "_method", "_nbytes", "_receive", "_task", "_timer", "_underway",
        "_untaken", "_within_s", "rpc",
    )  # fmt: skip

    def __init__(self, call: Any, rpc: Rpc, underway: Underway) -> None:
        self._call, self.rpc, self._underway = call, rpc, underway
        self._method: UnaryMethod | None = None
        self._batch: Batch | None = None
        self._closing: Batch | None = None
        self._close = cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._untaken: Untaken | None = None
        self._nbytes = 0
        rpc.cut_off = self.cut_off
        underway.running.add(self)

    def serve(self, method: UnaryMethod, within_s: float) -> None:
        """Receive the message, which must come within about so many seconds, and answer."""
        self._method, self._within_s = method, within_s
        self._receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
        self._underway.look_later(self)
        self._batch = Batch(self._call, (self._receive,), self._received)

    def refuse(self, reply: Reply) -> None:
        """Send a reply without a look at the message. A client that does not read the reply is cut off."""
        self._send(reply)
        self._timer = asyncio.get_running_loop().call_later(LAST_WORD_S, self.cut_off)

    def look(self) -> None:
        """Look at an rpc that takes long: watch for its client's leaving, a missing message and an untaken answer."""
        method = self._method
        assert method is not None
        if self._nbytes:
            self._untaken = method.untaken(self._nbytes, self.cut_off)
            return
        self._closing = Batch(self._call, (self._close,), self._closed)
        if self._task is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self.cut_off)

    def cut_off(self) -> None:
        """End the rpc at once. The client gets no reply, or a part of the reply."""
        for batch in (self._batch, self._closing):
            if batch is not None:
                batch.drop()
        self._cancel()
        self._end()

    def _received(self, _: bool) -> None:
        data = self._receive.message()
        del self._receive
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if data is None:
            # The client has left, or its message is over the limit, which gRPC says itself.
            self._end()
        else:
            self._task = asyncio.get_running_loop().create_task(self._run(data))

    async def _run(self, data: bytes) -> None:
        method = self._method
        assert method is not None
        try:
            reply = await method.run(data, self.rpc)
        except asyncio.CancelledError:
            self._end()
            raise
        except Exception as error:
            log.error("%s failed", self.rpc.path, exc_info=error)
            reply = FAULT
        if self._call is None:
            return
        # NOTE: gRPC keeps the bytes of the request too until the reply has left.
        self._nbytes = len(data) + len(reply.message or b"") + 1
        if self._closing is not None:
            self._underway.look_later(self)
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        if self._underway.stopped:
            self._end()
            return
        operations = [cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS)]
        if reply.message is not None:
            operations.append(cygrpc.SendMessageOperation(reply.message, _NO_FLAGS))
        code: int = reply.status.value[0]
        operations.append(
            cygrpc.SendStatusFromServerOperation(reply.trailers, code, reply.details, _NO_FLAGS)
        )
        if self._closing is None:
            operations.append(self._close)
        self._batch = Batch(self._call, tuple(operations), self._sent)

    def _sent(self, _: bool) -> None:
        self._end()

    def _closed(self, _: bool) -> None:
        if self._close.cancelled():
            self._cancel()

    def _cancel(self) -> None:
        """End the work for the rpc."""
        if self._task is not None:
            # NOTE: a task that is cancelled before its first step runs nothing of its coroutine.
            self._task.add_done_callback(self._end)
            self._task.cancel()

    def _end(self, _: object = None) -> None:
        if self._call is None:
            return
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
        if self._untaken is not None:
            self._untaken.end()
        self._underway.end(self)
        # NOTE: references in a circle would keep the messages until the collector runs, which is seldom.
        self._timer = self._untaken = self._batch = self._closing = self._task = None
        self.rpc.context, self.rpc.cut_off = None, _nothing
