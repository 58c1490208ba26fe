"""The grpc.aio server of one frontend: all services on one port, which the frontends of a server share.

1. At the drain health says NOT_SERVING. In a reload all else goes on until a new frontend listens (`Succession`). Then
   clients are asked to connect to the new frontend (`connections`), and streams go on until the drain is over.
2. When the server stops, streams are read no further.
3. Calls in work may finish until the drain is over. Then streams end with an error, and other calls are cut off.

`Health` is the standard health service: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from frontend.grpc import connections
from frontend.grpc.accepting import Door, Served, Server
from frontend.grpc.call import Call, GrpcService, Method, serialized
from frontend.grpc.connections import ConnectionLimiter
from frontend.grpc.received import Form
from frontend.grpc.rpc import Rpc
from frontend.grpc.streaming import LINGER_S, Streams
from frontend.grpc.unary import Unary
from frontend.http.bodies import Places
from frontend.server import state
from frontend.server.drain import SUCCESSION, Drain
from frontend.services import Services
from ipc.errors import ConfigError, PenstockError
from ipc.settings import Settings

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
        last = None
        while True:
            ending = self._draining.is_set()
            status = self._status(name)
            if status != last:
                await rpc.context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
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


log = logging.getLogger(__name__)
_REFLECTION = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
_CORE_LOGGER = "grpc._cython.cygrpc"

MAX_STREAMS = 1024
"""Most rpcs at a time on one connection. Further rpcs wait at the client."""
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 120, 20
SUCCESSION_SHARE = 0.5
"""Share of the graceful timeout that the frontend in place of this one may take until it listens."""
LONGEST_S = 86400.0
"""The grace that gRPC's own shutdown gets while a drain is not over."""
FAREWELL_S = 2.0
"""Seconds for which a replaced frontend asks its clients to leave."""
LOOK_EVERY_S = 0.05


class GrpcServer:
    """The gRPC server of a frontend: listens from `start` to `drain`, and ends its rpcs in `stop`."""

    def __init__(self, services: Services, offered: list[GrpcService]) -> None:
        self._services, self._offered = services, offered
        self._streams = Streams(services.settings.grpc.max_stream_requests)
        names = [service.descriptor.full_name for service in offered]
        self._health = Health(services, names)
        self._max_connections = _max_connections(services.settings)
        self._server = Server(
            options(services.settings, self._max_connections), Door(services.access, services.settings)
        )
        everything: list[GrpcService] = [*offered, self._health]
        for service in everything:
            mount(self._server, services, service, self._streams)
        self._server.add(self._health.watching, Served(None, stream=self._health.watch, send=serialized))
        listed = [*names, self._health.descriptor.full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(listed, self._server)
        self._server.read_by(_REFLECTION, _reflection_request)
        self._limiting: asyncio.Task[None] | None = None
        logging.getLogger(_CORE_LOGGER).addFilter(_without_clients_faults)
        self._stopping: asyncio.Task[None] | None = None
        self._since_ns = self._port = 0

    async def start(self) -> None:
        """Listen. Raises `ConfigError` when the address cannot be had."""
        bind = self._services.settings.grpc.bind
        try:
            self._port = self._server.add_insecure_port(bind)
        except RuntimeError:
            raise ConfigError(f"grpc.bind: {bind} cannot be had") from None
        await self._server.start()
        idle_s = self._services.settings.server.keepalive_s
        limiter = ConnectionLimiter(self._port, self._max_connections, idle_s, self._server.door.calls)
        self._limiting = asyncio.get_running_loop().create_task(limiter.run())
        self._since_ns = time.monotonic_ns()
        SUCCESSION.listens(self._services.slot)
        self._services.drain.on_begin(self.drain)
        log.info("gRPC on %s", bind)

    def drain(self) -> None:
        """Say NOT_SERVING from now on, and begin the handover or the stop."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def stop(self) -> None:
        """Stop, and wait until all rpcs have ended."""
        self.drain()
        assert self._stopping is not None
        await self._stopping

    async def _stop(self) -> None:
        drain, graceful_s = self._services.drain, self._services.settings.server.graceful_timeout_s
        await SUCCESSION.replaced(self._since_ns, graceful_s * SUCCESSION_SHARE)
        self._health.drain()
        if SUCCESSION.is_replaced(self._since_ns) and not SUCCESSION.is_stopping:
            await connections.ask_all_to_leave(self._port, FAREWELL_S)
        else:
            self._streams.drain()
            await _unless(drain, self._streams.ended())
        if self._limiting is not None:
            self._limiting.cancel()
        await _unless(drain, self._server.stop(LONGEST_S))
        self._streams.end()
        await asyncio.wait([asyncio.ensure_future(self._streams.ended())], timeout=2 * LINGER_S)
        await self._server.stop(None)


async def _unless(drain: Drain, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, unless the drain is over before its end."""
    task = asyncio.ensure_future(work)
    while not (task.done() or drain.is_over):
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    if not task.done():
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _reflection_request(data: bytes) -> reflection_pb2.ServerReflectionRequest:
    """The request; an empty request for other bytes, which the library answers with an error and not with a stack."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()


def _without_clients_faults(record: logging.LogRecord) -> bool:
    """Shorten to one line, or drop, the records that gRPC logs with a stack for faults of clients.

    Metadata that is no UTF-8 is read as Latin-1. A batch of operations fails when the client has gone meanwhile.
    """
    message = str(record.msg)
    if message.startswith("ExecuteBatchError raised in core"):
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
    return not message.startswith("Invalid encoding on")


def _max_connections(settings: Settings) -> int:
    """As many as the settings allow and the limit of open files leaves."""
    limits = (settings.server.max_connections, settings.grpc.max_connections)
    allowed = state.connection_shares(limits, state.hard_limit())[1]
    if allowed < settings.grpc.max_connections:
        log.warning("grpc.max_connections: the limit of open files leaves room for %d", allowed)
    return allowed


def options(settings: Settings, max_connections: int) -> list[tuple[str, Any]]:
    """Options of gRPC's core."""
    age_s = settings.grpc.max_connection_age_s
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_rpc_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", round(settings.server.header_deadline_s * 1000)),
        # Clients may send keepalive pings as often as they like, also without an rpc.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # A client that has vanished is noticed by our own pings.
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ]
    if age_s:
        grace_ms = round(settings.limits.request_timeout_s * 1000)
        options += [
            ("grpc.max_connection_age_ms", round(age_s * 1000)),
            ("grpc.max_connection_age_grace_ms", grace_ms),
        ]
    return options


def mount(server: Server, services: Services, service: GrpcService, streams: Streams) -> None:
    """Serve the methods of one service."""
    for name, method in service.methods.items():
        described = service.descriptor.methods_by_name[name]
        form = Form(GetMessageClass(described.input_type), method.raw_field, method.check)
        path = f"/{service.descriptor.full_name}/{name}"
        runner = Unary(services, service, method, path, form)
        need = method.need if isinstance(method.need, str) else None
        if described.client_streaming:
            serve = partial(streams.serve, runner)
            server.add(path, Served(need, runner.stream_refused, None, serve, None, form.receive, serialized))
        else:
            server.add(path, Served(need, runner.refused, runner))
