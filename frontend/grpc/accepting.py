"""The server of grpc.aio, with calls accepted in another way, since its own does not survive a path that is no text.

grpc.aio decodes the path of every call in the task that accepts calls: bytes that are no UTF-8 end that task, and with
it the server. Here every method is registered with gRPC's core, which compares paths as bytes.

1. The main loop of grpc.aio asks for the next call of each registered method, and for the next of all others. It gets
   a task that accepts these calls one after another, and ends only with the server.
2. A call of a registered method is handled under the name that it was registered by. Any other is answered
   UNIMPLEMENTED, whatever its path is.
3. Each call is served by two tasks of grpc.aio: one runs its handler and sends what that answers, the other waits for
   the end of the call. gRPC's core ends a call, and drops what it has not sent, when neither refers to it (`cut_off`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

import grpc
from grpc import aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_OTHER = "/"
"""The name under which calls are handled that no method has."""
_serving: ContextVar[weakref.ref[asyncio.Task[None]]] = ContextVar("serving")
"""What serves the call that the current task belongs to."""


def cut_off() -> Callable[[], None]:
    """What ends the call whose handler this task is, at once, and frees what its client has not taken."""
    handling, serving = asyncio.current_task(), _serving.get(None)

    def end() -> None:
        for task in (None if serving is None else serving(), handling):
            if task is not None:
                task.cancel()

    return end


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Accepts and starts calls."""

    def prepare(self, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]], limit: int) -> None:
        """Serve these methods, by their paths, and at most `limit` calls at a time."""
        self._limit, self._running = limit, set[asyncio.Task[None]]()
        self._resolver = cygrpc._MethodResolver([], dict(handlers))
        self.add_registered_method_handlers(dict(handlers))

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """What the main loop waits for: all calls of a method, of every other for None."""
        return asyncio.get_running_loop().create_task(self._accept(method))

    async def _accept(self, method: bytes | None) -> None:
        name = _OTHER if method is None else method.decode()
        while True:
            asking = self._request_call() if method is None else self._request_registered_call(method)
            self._serve(name, await asking)

    def _serve(self, name: str, call: Any) -> None:
        loop, context = asyncio.get_running_loop(), copy_context()
        handling = cygrpc._handle_rpc(name, self._resolver, (), call, loop, len(self._running) >= self._limit)
        task = loop.create_task(cygrpc._schedule_rpc_coro(handling, call, loop, name), context=context)
        # NOTE: the task has not run yet, so that of the handler, which it makes, gets this too.
        context.run(_serving.set, weakref.ref(task))
        self._running.add(task)
        task.add_done_callback(self._running.discard)


class Server(aio.Server):
    """A server without interceptors; methods are registered before it starts."""

    def __init__(self, options: Sequence[tuple[str, Any]], limit: int) -> None:
        self._core = _Core(cygrpc.get_working_loop(), None, (), (), tuple(options), None)
        self._limit = limit
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """The methods of one service."""
        self._handlers |= {f"/{service_name}/{name}": one for name, one in method_handlers.items()}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Nothing: what generated code adds so it registers as well."""

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
        self._core.prepare(self._handlers, self._limit)
        await self._core.start()

    async def stop(self, grace: float | None) -> None:
        """Accept no more, and cut off what is in work after `grace` seconds."""
        await self._core.shutdown(grace)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Wait for the end of the server."""
        return bool(await self._core.wait_for_termination(timeout))
