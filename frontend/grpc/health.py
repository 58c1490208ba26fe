"""The standard health service: SERVING while this server accepts traffic, for the whole and for each service.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health_pb2

from frontend.grpc.accepting import caller
from frontend.http.places import Places
from frontend.services import Services

WATCH_EVERY_S = 0.5
SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_MAX_WATCHERS = 256

Rpc = aio.ServicerContext[Any, Any]
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


class Health:
    """Answers for services by name. `Check` is open to all, like the probes over HTTP; `Watch` needs a key."""

    def __init__(self, services: Services, names: Collection[str]) -> None:
        self._services, self._names = services, {"", *names}
        self._watchers = Places(_MAX_WATCHERS)
        self._draining = asyncio.Event()

    OPEN = f"/{SERVICE.full_name}/Check"

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """The handlers by method."""
        answer = health_pb2.HealthCheckResponse.SerializeToString
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, None, answer),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, None, answer),
        }

    def drain(self) -> None:
        """Tell all watchers that this process serves no more, and end their calls."""
        self._draining.set()

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return UNKNOWN
        ready, _ = self._services.engine.ready()
        return SERVING if ready else NOT_SERVING

    async def _check(self, request: bytes, rpc: Rpc) -> health_pb2.HealthCheckResponse:
        status = self._status(await _service_of(request, rpc))
        if status == UNKNOWN:
            await rpc.abort(grpc.StatusCode.NOT_FOUND, "no service of that name is served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, request: bytes, rpc: Rpc) -> None:
        name, watcher = await _service_of(request, rpc), caller()
        if not self._watchers.take(watcher):
            message = (
                f"{_MAX_WATCHERS} clients may watch the health of this process, and of one caller no more than others "
                "leave free"
            )
            await rpc.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        try:
            await self._tell(name, rpc)
        finally:
            self._watchers.give(watcher)

    async def _tell(self, name: str, rpc: Rpc) -> None:
        told = None
        while True:
            ending = self._draining.is_set()
            status = self._status(name)
            if status != told:
                await rpc.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if ending:
                return
            try:
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._draining.wait()
            except TimeoutError:
                continue


async def _service_of(request: bytes, rpc: Rpc) -> str:
    """The name of the service that a request asks for."""
    try:
        return str(health_pb2.HealthCheckRequest.FromString(request).service)
    except DecodeError:
        await rpc.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of this method")
        raise
