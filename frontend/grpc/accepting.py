"""The server of grpc.aio, with calls accepted in another way, since its own does not survive a path that is no text.

grpc.aio decodes the path of every call in the task that accepts calls: bytes that are no UTF-8 end that task, and with
it the server. Here every method is registered with gRPC's core, which compares paths as bytes.

1. The main loop of grpc.aio asks for the next call of each registered method, and for the next of all others. It gets
   a task that accepts these calls one after another, and ends only with the server.
2. A call of a registered method is handled under the name that it was registered by. Any other is answered
   UNIMPLEMENTED, whatever its path is.
3. The door decides on a call by its head. The handler of a refused call reads nothing and answers the reason.
4. The message of a unary call must come in time, and a refusal must be taken in time.
5. Each call is served by two tasks of grpc.aio: one runs its handler and sends what that answers, the other waits for
   the end of the call. gRPC's core ends a call, and drops what it has not sent, when neither refers to it (`cut_off`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import grpc
from grpc import aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from frontend.grpc import statuses
from frontend.grpc.door import Door
from ipc.errors import PenstockError

_OTHER = "/"
"""The name under which calls are handled that no method has."""
LAST_WORD_S = 1.0
"""How long a client may take to read a status and nothing else."""
Refuse = Callable[[PenstockError, Any], Awaitable[None]]
"""Ends a call with an error, in the form of its contract."""


class Served:
    """A call that is being served."""

    __slots__ = ("__weakref__", "_handling", "_serving", "_timer", "caller")

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self._handling: weakref.ref[asyncio.Task[Any]] | None = None
        self._serving: weakref.ref[asyncio.Task[None]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, handling: Awaitable[None]) -> None:
        """The first of its tasks."""
        task = asyncio.current_task()
        assert task is not None
        self._handling = weakref.ref(task)
        await handling

    def served_by(self, task: asyncio.Task[None]) -> None:
        """The second of them."""
        self._serving = weakref.ref(task)

    def end_after(self, seconds: float) -> None:
        """End the call then, unless its message has `arrived`."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def arrived(self) -> None:
        """Stop the timer: the message has come, or will not come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """End the call at once."""
        for task in (self._serving, self._handling):
            if task is not None and (found := task()) is not None:
                found.cancel()


_serving: ContextVar[Served] = ContextVar("serving")
"""The call that the current task belongs to."""


def cut_off() -> Callable[[], None]:
    """A function that ends the current task's call at once, and frees the answers that the client has not taken."""
    return _serving.get().end


def caller() -> str:
    """The account of the current call's place at the door: the id of a key, or an address."""
    return _serving.get().caller


def _noting(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler; the arrival of its message stops the timer of the call."""
    if handler.request_streaming:
        return handler
    receive: Callable[[bytes], Any] = handler.request_deserializer or bytes

    def noting(data: bytes) -> Any:
        _serving.get().arrived()
        return receive(data)

    return handler._replace(request_deserializer=noting)  # type: ignore[attr-defined, no-any-return]


async def _abort(error: PenstockError, rpc: Any) -> None:
    await rpc.abort(statuses.status_of(error), statuses.shortened(error.message), statuses.trailers(error))


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Accepts and starts calls."""

    def prepare(
        self,
        handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]],
        refusals: Mapping[str, Refuse],
        door: Door,
    ) -> None:
        """Serve these methods, by their paths, to callers that the door lets in."""
        self._door, self._refusals, self._running = door, refusals, set[asyncio.Task[None]]()
        self._unary = {path for path, handler in handlers.items() if not handler.request_streaming}
        self._resolver = cygrpc._MethodResolver([], dict(handlers))
        self.add_registered_method_handlers(dict(handlers))

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """The task that the main loop waits for: accepts all calls of a method, for None those of unknown methods."""
        return asyncio.get_running_loop().create_task(self._accept(method))

    async def _accept(self, method: bytes | None) -> None:
        name = _OTHER if method is None else method.decode()
        while True:
            asking = self._request_call() if method is None else self._request_registered_call(method)
            self._serve(name, await asking)

    def _serve(self, name: str, call: Any) -> None:
        loop, context = asyncio.get_running_loop(), copy_context()
        resolver, leave, limit_s = self._resolver, None, LAST_WORD_S
        served = Served("")
        if name != _OTHER:
            entry = self._door.enter(name, cygrpc._ServicerContext(call, None, None, loop))
            served.caller, leave = entry.caller, entry.leave
            if entry.refusal is None:
                limit_s = self._door.message_within_s(name) if name in self._unary else 0.0
            else:
                resolver = cygrpc._MethodResolver([], {name: self._refusing(name, entry.refusal)})
        handling = cygrpc._handle_rpc(name, resolver, (), call, loop, False)
        task = loop.create_task(
            cygrpc._schedule_rpc_coro(served.run(handling), call, loop, name), context=context
        )
        served.served_by(task)
        # NOTE: the task has not run yet, so the task of the handler, made by this task, inherits the variable too.
        context.run(_serving.set, served)
        if limit_s:
            served.end_after(limit_s)
        self._running.add(task)
        task.add_done_callback(partial(self._end, served, leave))

    def _end(self, served: Served, leave: Callable[[], None] | None, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        served.arrived()
        if leave is not None:
            leave()

    def _refusing(self, name: str, error: PenstockError) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that reads nothing, whatever the method's own is like."""
        refuse = self._refusals.get(name, _abort)

        async def handle(_: object, rpc: Any) -> None:
            await refuse(error, rpc)

        return grpc.stream_stream_rpc_method_handler(handle)


class Server(aio.Server):
    """A server without interceptors; methods are registered before it starts."""

    def __init__(self, options: Sequence[tuple[str, Any]], door: Door) -> None:
        self._core = _Core(cygrpc.get_working_loop(), None, (), (), tuple(options), None)
        self.door = door
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._refusals: dict[str, Refuse] = {}

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """The methods of one service."""
        for name, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{name}"] = _noting(handler)

    def read_by(self, path: str, deserialize: Callable[[bytes], Any]) -> None:
        """Replace the deserializer of a generated handler of a stream."""
        self._handlers[path] = self._handlers[path]._replace(request_deserializer=deserialize)  # type: ignore[attr-defined]

    def refuse_by(self, refusals: Mapping[str, Refuse]) -> None:
        """How methods, by their paths, say that a call may not come in; the others by a status alone."""
        self._refusals |= refusals

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
        """Accept calls."""
        self._core.prepare(self._handlers, self._refusals, self.door)
        await self._core.start()

    async def stop(self, grace: float | None) -> None:
        """Accept no more calls, and cut off the calls in work after `grace` seconds."""
        await self._core.shutdown(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Wait for the end of the server."""
        return bool(await self._core.wait_for_termination(timeout))
