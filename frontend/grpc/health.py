"""The standard health service: SERVING while this server accepts traffic, for the whole and for each service.

https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health_pb2

from frontend.grpc.call import Call, Method
from frontend.grpc.rpc import Rpc
from frontend.http.places import Places
from frontend.services import Services
from ipc.errors import PenstockError

WATCH_EVERY_S = 0.5
_MAX_WATCHERS = 256

SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


class UnknownService(PenstockError):
    """No service of the name that a check asks for."""

    code, status = "SERVICE_NOT_FOUND", 404


class Health:
    """Answers for services by name. `Check` is open to all, like the probes over HTTP; `Watch` needs a key."""

    protocol = "health"
    descriptor: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]
    watching = f"/{descriptor.full_name}/Watch"

    def __init__(self, services: Services, names: Collection[str]) -> None:
        self._services, self._names = services, {"", *names}
        self._watchers = Places(_MAX_WATCHERS)
        self._draining = asyncio.Event()
        self.methods: Mapping[str, Method] = {"Check": Method(self._check, need="")}

    def message_of(self, error: PenstockError) -> str:
        """The words of an error."""
        return error.message

    def drain(self) -> None:
        """Tell all watchers that this process serves no more, and end their calls."""
        self._draining.set()

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return UNKNOWN
        ready, _ = self._services.engine.ready()
        return SERVING if ready else NOT_SERVING

    async def _check(self, call: Call, request: Any) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == UNKNOWN:
            raise UnknownService("no service of that name is served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def watch(self, rpc: Rpc) -> None:
        """Tell one client the status of a service now and whenever it changes."""
        name = await self._service_of(rpc)
        if name is None:
            return
        account = rpc.account
        if not self._watchers.take(account):
            message = (
                f"{_MAX_WATCHERS} clients may watch the health of this process, and of one caller no more than others "
                "leave free"
            )
            await rpc.context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        try:
            await self._tell(name, rpc)
        finally:
            self._watchers.give(account)

    async def _tell(self, name: str, rpc: Rpc) -> None:
        told = None
        while True:
            ending = self._draining.is_set()
            status = self._status(name)
            if status != told:
                await rpc.context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if ending:
                return
            try:
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._draining.wait()
            except TimeoutError:
                continue

    async def _service_of(self, rpc: Rpc) -> str | None:
        """The name of the service that a client asks for; None if the request does not come in time, or not at all."""
        try:
            async with asyncio.timeout(self._services.settings.limits.request_timeout_s):
                request = await rpc.context.read()
        except TimeoutError:
            rpc.cut_off()
            return None
        if request is aio.EOF:
            return None
        try:
            return str(health_pb2.HealthCheckRequest.FromString(request).service)
        except DecodeError:
            await rpc.context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of this method"
            )
            raise
