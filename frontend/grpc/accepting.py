"""The server of grpc.aio, with rpcs accepted in another way, since its own does not survive a path that is no text.

grpc.aio decodes the path of every rpc in the task that accepts rpcs: bytes that are no UTF-8 end that task, and with
it the server. Here every method is registered with gRPC's core, which compares paths as bytes.

1. The main loop of grpc.aio asks for the next rpc of each registered method, and for the next of all others. The
   loop gets a task that accepts these rpcs one after another, and ends only with the server.
2. The door decides on an rpc by its head. A refused rpc is answered without a look at its messages. So is an rpc of no
   registered method, whatever its path is: UNIMPLEMENTED.
3. A unary rpc is served as `rpc` says. A stream is served by grpc.aio, in two tasks: one runs the handler and sends
   what it answers, the other waits for the end of the rpc.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import StatusCode, aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from frontend.access.gate import Gate
from frontend.grpc.connections import CallsByConnection
from frontend.grpc.rpc import (
    FAULT,
    Reply,
    Rpc,
    ServedUnary,
    UnaryMethod,
    Underway,
    shortened,
    status_of,
    trailers,
)
from frontend.http.bodies import Places
from frontend.route_rows import Need
from ipc.errors import AccessRefused, PenstockError, QueueFull
from ipc.settings import Settings

log = logging.getLogger(__name__)

OPEN_RPCS = 256
"""Calls at a time of methods that need no key."""
_UNKNOWN = Reply(None, (), StatusCode.UNIMPLEMENTED, "Method not found!")


class Door:
    """Lets calls in by their heads, before any byte of a request is read, and bounds the calls of each caller.

    1. With keys set, a call without a valid key of the method's scope ends on its head and holds no place.
    2. A call that is let in holds a place of `grpc.max_rpcs` until its end: on account of its key, and without keys on
       account of the address that it came from (`places`).
    3. Methods that are open to all, such as health checks, have a few places of their own, by address.
    """

    def __init__(self, access: Gate, settings: Settings) -> None:
        self.calls = CallsByConnection()
        """Calls that were let in, by connection."""
        self._access, self._settings = access, settings
        self._places, self._open_places = Places(settings.grpc.max_rpcs), Places(OPEN_RPCS)

    def message_within_s(self, need: Need | None) -> float:
        """Seconds that a call has for its message: those of a head for methods open to all, else those of a request."""
        settings = self._settings
        return settings.server.header_deadline_s if need == "" else settings.limits.request_timeout_s

    def enter(self, rpc: Rpc, need: Need | None, spend: bool) -> PenstockError | None:
        """Decide on a call by its head; None if it is let in. Then its end must call `leave`.

        `need` None: a valid key of any scope. With `spend` the call counts against the rate of its key.
        """
        access = self._access
        try:
            head = rpc.head()
            rpc.grant = access.caller(head) if need is None else access.grant_for(head, need, spend)
        except AccessRefused as error:
            return error
        rpc.account = rpc.grant.caller or rpc.host
        places = self._open_places if need == "" else self._places
        if not places.take(rpc.account):
            return _no_place(places.limit, need == "")
        rpc.places = places
        self.calls.begin(rpc.peer)
        return None

    def leave(self, rpc: Rpc) -> None:
        """A call has ended; a refused call holds nothing."""
        places, rpc.places = rpc.places, None
        if places is not None:
            places.give(rpc.account)
            self.calls.end(rpc.peer)


def _no_place(limit: int, is_open: bool) -> QueueFull:
    what = "calls that need no key" if is_open else "rpcs (grpc.max_rpcs)"
    return QueueFull(
        f"this server takes {limit} {what} at a time, and of one caller no more than others leave free",
        retry_after_s=1,
    )


def _refused(error: PenstockError, _: Rpc) -> Reply:
    """A refusal by a status alone."""
    return Reply(None, trailers(error), status_of(error), shortened(error.message))


@dataclass(slots=True)
class Served:
    """A method of the server. `need` None: a valid key of any scope. `refused` makes the reply to a refused rpc.

    One of three serves: `unary`; `stream`, whose messages are read by `receive` and written by `send`; or `library`,
    which is what generated code brings for a stream.
    """

    need: Need | None
    refused: Callable[[PenstockError, Rpc], Reply] = _refused
    unary: UnaryMethod | None = None
    stream: Callable[[Rpc], Awaitable[None]] | None = None
    library: grpc.RpcMethodHandler[Any, Any] | None = None
    receive: Callable[[bytes], Any] | None = None
    send: Callable[[Any], bytes] | None = None


def _refusal(served: Served, error: PenstockError, rpc: Rpc) -> Reply:
    """The reply to a refused rpc. The task that accepts rpcs outlives a fault of the method."""
    try:
        return served.refused(error, rpc)
    except Exception as fault:
        log.error("%s failed", rpc.path, exc_info=fault)
        return FAULT


class _ServedStream:
    """A stream that was let in, and the two tasks of grpc.aio that refer to it."""

    __slots__ = ("__weakref__", "_handling", "_serving")

    def __init__(self) -> None:
        self._handling: weakref.ref[asyncio.Task[Any]] | None = None
        self._serving: weakref.ref[asyncio.Task[None]] | None = None

    async def run(self, handling: Awaitable[None]) -> None:
        """Await the handler in the present task, the first of both."""
        task = asyncio.current_task()
        assert task is not None
        self._handling = weakref.ref(task)
        await handling

    def served_by(self, task: asyncio.Task[None]) -> None:
        """Note the second task, which waits for the end of the rpc."""
        self._serving = weakref.ref(task)

    def cut_off(self) -> None:
        """End the rpc at once."""
        for task in (self._serving, self._handling):
            if task is not None and (running := task()) is not None:
                running.cancel()


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Accepts and starts rpcs."""

    def prepare(self, methods: dict[str, Served], door: Door) -> None:
        """Serve these methods, by their paths, to callers that the door lets in."""
        self._methods, self._door, self._running = methods, door, set[asyncio.Task[None]]()
        self.underway = Underway(door.leave)
        self.add_registered_method_handlers(dict.fromkeys(methods))

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """The task that the main loop waits for: accepts all rpcs of a method; with None rpcs of unknown methods."""
        return asyncio.get_running_loop().create_task(self._accept(method))

    async def _accept(self, method: bytes | None) -> None:
        if method is None:
            while True:
                self._refuse(await self._request_call(), _UNKNOWN)
        path = method.decode()
        served = self._methods[path]
        while True:
            self._serve(path, served, await self._request_registered_call(method))

    def _refuse(self, call: Any, reply: Reply, rpc: Rpc | None = None) -> None:
        ServedUnary(
            call, rpc or Rpc("", cygrpc._ServicerContext(call, None, None, None)), self.underway
        ).refuse(reply)

    def _serve(self, path: str, served: Served, call: Any) -> None:
        loop = asyncio.get_running_loop()
        rpc = Rpc(path, cygrpc._ServicerContext(call, served.receive, served.send, loop))
        refusal = self._door.enter(rpc, served.need, spend=served.unary is not None)
        if refusal is not None:
            # NOTE: `refused` sets context variables to the ids of the request, which other requests must not see.
            self._refuse(call, copy_context().run(_refusal, served, refusal, rpc), rpc)
        elif served.unary is not None:
            ServedUnary(call, rpc, self.underway).serve(
                served.unary, self._door.message_within_s(served.need)
            )
        else:
            self._stream(served, rpc, call, loop)

    def _stream(self, served: Served, rpc: Rpc, call: Any, loop: asyncio.AbstractEventLoop) -> None:
        stream = _ServedStream()
        rpc.cut_off = stream.cut_off
        handler = served.library or _handler_of(served.stream, rpc)
        resolver = cygrpc._MethodResolver([], {rpc.path: handler})
        handling = cygrpc._handle_rpc(rpc.path, resolver, (), call, loop, False)
        task = loop.create_task(cygrpc._schedule_rpc_coro(stream.run(handling), call, loop, rpc.path))
        stream.served_by(task)
        self._running.add(task)

        def end(_: object) -> None:
            self._running.discard(task)
            self._door.leave(rpc)
            rpc.context = None

        task.add_done_callback(end)


def _handler_of(stream: Callable[[Rpc], Awaitable[None]] | None, rpc: Rpc) -> grpc.RpcMethodHandler[Any, Any]:
    """What grpc.aio calls for one stream; the iterator of messages and the context that it gives are left alone."""
    assert stream is not None

    async def handle(_: object, context: object) -> None:
        await stream(rpc)

    return grpc.stream_stream_rpc_method_handler(handle)


class Server(aio.Server):
    """A server without interceptors; methods are registered before it starts."""

    def __init__(self, options: Sequence[tuple[str, Any]], door: Door) -> None:
        self._core = _Core(cygrpc.get_working_loop(), None, (), (), tuple(options), None)
        self.door = door
        self._methods: dict[str, Served] = {}

    def add(self, path: str, served: Served) -> None:
        """Register a method."""
        self._methods[path] = served

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """The methods of one service of generated code, all of which must be streams of requests."""
        for name, handler in method_handlers.items():
            assert handler.request_streaming
            self.add(f"/{service_name}/{name}", Served(None, library=handler))

    def read_by(self, path: str, deserialize: Callable[[bytes], Any]) -> None:
        """Replace the deserializer of a handler of generated code."""
        handler: Any = self._methods[path].library
        self._methods[path].library = handler._replace(request_deserializer=deserialize)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Nothing: generated code registers its methods one by one as well."""

    def add_insecure_port(self, address: str) -> int:
        """Listen on HOST:PORT; the port. Raises `RuntimeError` when it cannot be had."""
        port = self._core.add_insecure_port(address.encode())
        if not port:
            raise RuntimeError(f"cannot listen on {address}")
        return int(port)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Not offered: a proxy in front ends TLS."""
        raise NotImplementedError("TLS is not offered on this port: a proxy in front of it ends TLS")

    async def start(self) -> None:
        """Accept rpcs."""
        self._core.prepare(self._methods, self.door)
        await self._core.start()

    async def stop(self, grace: float | None) -> None:
        """Accept no more rpcs, and cut off the rpcs in work after `grace` seconds."""
        await self._core.shutdown(grace)
        self._core.underway.stopped = True

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Wait for the end of the server."""
        return bool(await self._core.wait_for_termination(timeout))
