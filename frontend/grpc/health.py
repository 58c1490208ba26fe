"""The standard health service: SERVING while this server accepts traffic, for the whole and for each service.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

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
    """Answers for the services of the given names; open to all, like the probes over HTTP."""

    def __init__(self, services: Services, names: Collection[str]) -> None:
        self._services, self._names = services, {"", *names}
        self._watchers = 0
        self._draining = asyncio.Event()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """What gRPC calls, by method."""
        request = health_pb2.HealthCheckRequest.FromString
        answer = health_pb2.HealthCheckResponse.SerializeToString
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, request, answer),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, request, answer),
        }

    def drain(self) -> None:
        """Tell all who watch that this process serves no more, and let them go."""
        self._draining.set()

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return UNKNOWN
        ready, _ = self._services.engine.ready()
        return SERVING if ready else NOT_SERVING

    async def _check(
        self, request: health_pb2.HealthCheckRequest, rpc: Rpc
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == UNKNOWN:
            await rpc.abort(grpc.StatusCode.NOT_FOUND, "no service of that name is served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, request: health_pb2.HealthCheckRequest, rpc: Rpc) -> None:
        if self._watchers >= _MAX_WATCHERS:
            message = f"more than {_MAX_WATCHERS} clients watch the health of this process"
            await rpc.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._watchers += 1
        try:
            await self._tell(request.service, rpc)
        finally:
            self._watchers -= 1

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
