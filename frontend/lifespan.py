"""The life of one frontend, after the fork, on the event loop, and the block that its server prints after the start.

1. Start: take the lowest free frontend slot, bind metrics and logging to the slot, make the services, start the client
   (which finds the workers) and the watch. Workers that are up already tell their models before the first request.
2. Twice a second the watch writes readiness, joined workers and memory into metrics and to systemd. A frontend without
   a supervisor ends after `SUPERVISOR_GRACE_S`, so that the server ends as a unit.
3. The first frontend that is ready prints the block: addresses, models, devices, limits, and what is off. Where a
   model answers before the others are loaded, a short block says so. The first frontend that learns that no model of
   the start could be loaded prints what failed and what helps.
4. Every ten seconds one frontend adds a point to the history of the last hour (`frontend.status.history`).
5. End: say goodbye to the workers, give the slot back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

from frontend import assembly
from frontend.agent.host import ToolHost
from frontend.agent.parts import parts_of
from frontend.engine.interface import LOADING, NONE_LOADED
from frontend.services import Services
from frontend.status.agents import lacks
from frontend.status.history import Keeper
from ipc import addresses, logs, sweep, version
from ipc.memory import copies
from ipc.metrics import registry as metrics
from ipc.processes import starting as processes
from ipc.processes.liveness import SlotLock, lowest_free_slot
from ipc.processes.paths import TOOLS, prepare_run_dir
from ipc.processes.starting import Notifier
from ipc.version import VERSION
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import folded, models_ready

if TYPE_CHECKING:
    from frontend.grpc.server import GrpcServer

log = logging.getLogger(__name__)

_HEADS = {
    "first": "answers; the start goes on with the models that are not loaded yet",
    "ready": "is ready",
    "failure": f"is not ready: {NONE_LOADED}",
}
MOST_MODELS = 12
"""Models with a line of their own."""
WATCH_EVERY_S = 0.5
SUPERVISOR_GRACE_S = 5.0
EXIT_UNSUPERVISED = 3


def summary(services: Services) -> str:
    """One line: models ready, workers up, and what tools and files lack."""
    up = sum(worker.responsive for worker in services.directory.workers())
    missing = [f"warning: {problem.text}" for problem in lacks(services)]
    return ", ".join([models_ready(_statuses(services)), f"{up} workers up", *missing])


Stage = Literal["first", "ready", "failure"]
"""Of a start: a first model answers and others load; all models of the start were tried; none could be loaded."""


def stage_of(services: Services, ready: bool, why: str) -> Stage | None:
    """The stage that the start has reached, by the readiness of the engine; None before the first stage."""
    if ready:
        return "ready"
    if why == LOADING:
        states = {status.state for status in _statuses(services)}
        return "first" if {"loaded", "loading"} <= states else None
    return "failure" if why == NONE_LOADED else None


def started(services: Services, stage: Stage = "ready") -> None:
    """Print the block of a stage, as the first frontend of a server that gets there.

    In JSON logs the block is one line.
    """
    try:
        os.close(os.open(services.settings.paths.announced(stage), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    text = block(services, stage)
    if logs.is_text(services.settings.log, sys.stderr):
        logs.write(text)
    else:
        line = "; ".join(" ".join(line.split()) for line in text.replace("\\\n", "").splitlines())
        log.log(logging.ERROR if stage == "failure" else logging.INFO, line)


def block(services: Services, stage: Stage = "ready") -> str:
    """Text of the block of a stage."""
    settings = services.settings
    url = _url(settings.server.bind)
    page = "" if addresses.unix_path(settings.server.bind) else " (in a browser: the live page)"
    head = _HEADS[stage]
    lines = [f"Penstock {VERSION} {head}", f"  url        {url}{page}"]
    if stage == "first":
        return "\n".join([*lines, *_models(services), *_example(services, url)])
    if settings.grpc.enabled:
        lines.append(f"  gRPC       {settings.grpc.bind}")
    server = settings.server
    binds = (("metrics", server.metrics_bind), ("health", server.health_bind), ("MCP", server.mcp_bind))
    for what, apart in binds:
        if apart:
            lines.append(f"  {what:10s} {apart}")
    lines += _models(services)
    for worker in services.directory.workers():
        lines.append(
            f"  worker {worker.number}   {worker.device}, {worker.threads} threads, "
            f"{settings.arena.bytes >> 20} MiB arena"
        )
    limits = settings.limits
    lines += [
        f"  limits     body {limits.max_body_bytes >> 20} MiB, {limits.max_items} items, "
        f"text {limits.max_text_bytes >> 10} KiB, request {limits.request_timeout_s:g} s",
        f"  access     {_access(services)}",
        f"  frontends  {settings.frontend_count}; run directory {settings.paths.root}",
        f"  off        {', '.join(_off(services))}",
    ]
    if settings.is_gateway:
        lines.append(f"  brokers    {', '.join(settings.cluster.urls)}")
    return "\n".join([*lines, *(_ways(services) if stage == "failure" else _example(services, url))])


def _url(bind: str) -> str:
    """Arguments of curl that reach the address: a URL, after an option for a Unix socket."""
    if path := addresses.unix_path(bind):
        return f"--unix-socket {path} http://localhost"
    host, _, port = bind.rpartition(":")
    return f"http://{'localhost' if host in ('0.0.0.0', '127.0.0.1', '[::]') else host}:{port}"


def _models(services: Services) -> list[str]:
    """A line for each of some models that the start loaded or failed to load, for the rest of them, and for all others.

    A profile has a line of its own where the profile's state differs from that of the model.
    """
    statuses = [each.status for each in folded(_statuses(services))]
    listed = [status for status in statuses if status.state != "available"]
    lines = []
    for status in listed[:MOST_MODELS]:
        device = f" on {status.device}" if status.device else ""
        note = f" ({status.error_class}: {status.error_message})" if status.state == "failed" else ""
        lines.append(f"  model      {status.name}: {status.state}{device}{note}{_generating(status)}")
    if rest := Counter(status.state for status in listed[MOST_MODELS:]):
        states = ", ".join(f"{count} {state}" for state, count in rest.items())
        lines.append(f"  models     {rest.total()} more: {states}; see /v1/models")
    if more := len(statuses) - len(listed):
        when = ", loaded when asked for" if services.settings.catalog.on_demand else ""
        lines.append(f"  models     {more}{' more' if lines else ''} in the catalog{when}: see /v1/models")
    return lines


def _generating(status: ModelStatus) -> str:
    """What the operator of a model that generates text should know: how tools are shown, what bounds the context."""
    tools = f"; tools by {status.tools}" if status.tools not in ("", "none") else ""
    bound = f"; {status.max_sequence_length} tokens by {status.limited_by}" if status.limited_by else ""
    return tools + bound


def _statuses(services: Services) -> list[ModelStatus]:
    return [services.directory.status(name) for name in services.catalog]


def _ways(services: Services) -> list[str]:
    """What helps when no model could be loaded: to wait for another try, or to mend the cause."""
    failed = [status for status in _statuses(services) if status.state == "failed"]
    lines = []
    if any(not status.permanent for status in failed):
        lines.append("  next       the server tries models that failed with NETWORK or OOM again by itself")
    if any(status.permanent for status in failed):
        lines.append("  next       mend the cause that a model's line names; stop with Ctrl-C, start again")
    return [*lines, "  help       docs/troubleshooting.md; `penstock check` looks for mistakes in settings"]


def _example(services: Services, url: str) -> list[str]:
    """A request to paste, for the first loaded model that chats or encodes text."""
    for name, entry in services.catalog.items():
        if services.directory.status(name).state != "loaded" or "text" not in entry.inputs:
            continue
        asked: dict[str, Any] = {"model": name}
        if "chat" in entry.outputs:
            path, asked["messages"] = "chat/completions", [{"role": "user", "content": "hello"}]
        elif "dense" in entry.outputs:
            path, asked["input"] = "embeddings", "hello"
        else:
            continue
        key = "-H 'Authorization: Bearer KEY' " if services.access.closed else ""
        body = json.dumps(asked)
        return [
            f"  try        curl {url}/v1/{path} {key}-H 'Content-Type: application/json' \\",
            f"             -d '{body}'",
        ]
    return []


def _off(services: Services) -> list[str]:
    unset = {
        "API keys": not services.access.closed,
        "tracing": not services.settings.tracing.endpoint,
        "remote code": not services.settings.worker.trust_remote_code,
    }
    return [name for name, off in unset.items() if off]


def _access(services: Services) -> str:
    server = services.settings.server
    if not services.access.closed:
        return f"no keys (server.keys_file is empty): whoever reaches {server.bind} may call"
    count = len(services.access.entries)
    return f"{count} API key{'s' if count > 1 else ''}; /metrics {'open' if server.open_metrics else 'needs one too'}"


class Watch:
    """The watch of one frontend; `run` is a task that ends when it is cancelled."""

    def __init__(self, services: Services, families: metrics.FrontendMetrics) -> None:
        self._services, self._metrics = services, families
        self._notifier = Notifier(os.environ.get("PENSTOCK_NOTIFY_SOCKET", ""))
        self._told = False
        self._announced = set[Stage]()
        """Stages whose blocks are out."""
        self._copied = copies.Reported()
        self._unsupervised_s = 0.0
        self._was_full = False

    async def run(self) -> None:
        """Look twice a second. A full disk or a lack of descriptors costs one look, never the watch."""
        is_gateway = self._services.settings.is_gateway
        supervised = not is_gateway and os.environ.get("PENSTOCK_SUPERVISE", "1") != "0"
        while True:
            try:
                await self._look(supervised)
            except OSError as error:
                log.error("watching this frontend failed: %s", error)
            await asyncio.sleep(WATCH_EVERY_S)

    async def _look(self, supervised: bool) -> None:
        """Report readiness, check the supervisor, and print the block last, since printing may fail."""
        ready, why = self._services.engine.ready()
        self._report(ready)
        self._follow()
        if ready and not self._told:
            self._told = self._notifier.send(ready=1)
        if not self._services.drain.draining:
            self._notifier.send(watchdog=1, status=summary(self._services) if ready else why)
        if supervised:
            await self._check_supervisor()
        stage = stage_of(self._services, ready, why)
        # After the start a worker that comes back loads all models again.
        known = self._announced | ({"first"} if self._announced else set())
        if stage is not None and stage not in known:
            started(self._services, stage)
            self._announced.add(stage)

    def _follow(self) -> None:
        """Follow changes that operators made at other frontends. Unreadable state must not end the watch."""
        try:
            self._services.extensions.apply()
        except OSError as error:
            log.error("changes of other frontends cannot be read: %s", error)

    async def _check_supervisor(self) -> None:
        alive = await self._services.engine.is_kept_alive()
        self._unsupervised_s = 0.0 if alive else self._unsupervised_s + WATCH_EVERY_S
        if self._unsupervised_s > SUPERVISOR_GRACE_S and not self._services.drain.draining:
            log.critical("the supervisor is gone; this server stops")
            logs.flush()
            os._exit(EXIT_UNSUPERVISED)

    def _report(self, ready: bool) -> None:
        self._metrics.ready.set(ready)
        if ready and "ready" not in self._announced:
            # The models of repositories are known now, since a worker has told them.
            self._metrics.touch_models(self._services.catalog)
        name = f"frontend-{self._services.slot}"
        self._metrics.input_shm_used.labels(name).set(self._services.tensor_inference.inputs.used_nbytes)
        self._copied.report(self._metrics.copied, name)
        self._report_state()
        if self._services.meter is not None:
            self._services.meter.report()
        if self._services.settings.agent.has_tools:
            self._metrics.tool_host_up.labels(TOOLS).set(self._services.agent.host.ready is not None)
        # The workers of boxes come and go with their boxes, which `report` counts.
        for worker in () if self._services.settings.is_gateway else self._services.directory.workers():
            self._metrics.workers_joined.labels(worker.name).set(worker.responsive)

    def _report_state(self) -> None:
        state = self._services.state
        for gauge, amount in zip(
            (self._metrics.state_files, self._metrics.state_bytes), state.kept, strict=True
        ):
            gauge.set(amount)
        if state.is_full and not self._was_full:
            log.warning("the state directory has no room for another file (state.max_file_bytes)")
        self._was_full = state.is_full
        self._metrics.state_full.set(state.is_full)


class Lifespan:
    """Falcon's lifespan hooks of one frontend."""

    def __init__(self, services: Services, behind: Callable[[Services], assembly.Backend]) -> None:
        """`behind` makes the engine of the frontend."""
        self._services, self._behind = services, behind
        # NOTE: no code releases the lock: the kernel frees the lock and the listeners at the end of the process.
        self._lock: SlotLock | None = None
        self._leave: Callable[[], Awaitable[None]] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._keeper: Keeper | None = None
        self._metrics: metrics.FrontendMetrics | None = None
        self._grpc: GrpcServer | None = None

    async def process_startup(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        """Fill in the services."""
        services, settings = self._services, self._services.settings
        prepare_run_dir(settings.paths)
        services.slot, self._lock = lowest_free_slot(settings.paths.root, "frontend")
        name = f"frontend-{services.slot}"
        sweep.sweep_inputs(settings.paths, name)
        logs.configure(settings.log, name)
        processes.title(f"frontend {services.slot}")
        metrics.configure(settings.paths, name)
        self._metrics = metrics.FrontendMetrics()
        self._metrics.touch(services.catalog, settings.worker_count, version.VERSION)
        self._metrics.touch_keys(entry.name for entry in services.access.entries)
        services.access.meter.use_row(services.slot)
        self._metrics.tally.follow(asyncio.get_running_loop())
        self._leave = assembly.assemble(services, self._metrics, self._behind)
        host = ToolHost(settings.paths.tools_socket())
        services.agent = parts_of(services, host)
        await services.extensions.control.begin()
        self._grpc = await _start_grpc(services)
        watch = Watch(services, self._metrics)
        self._keeper = Keeper(settings.paths, services.directory.workers)
        own = [watch.run, self._keeper.run, *([host.run_link] if settings.agent.has_tools else [])]
        self._tasks = [asyncio.get_running_loop().create_task(run()) for run in (*own, *services.lasting)]
        processes.collect_seldom()

    async def process_shutdown(self, scope: dict[str, Any], event: dict[str, Any]) -> None:
        """Give everything back, once the work without requests has ended."""
        log.info("no requests are open; this frontend ends")
        if self._grpc is not None:
            await self._grpc.stop()
        await self._services.background.end(self._services.drain)
        for task in self._tasks:
            task.cancel()
        if self._services.agent is not None:
            await self._services.agent.close()
        await self._services.close_fetcher()
        if self._services.state is not None:
            self._services.state.end()
        if self._keeper is not None:
            self._keeper.close()
        if self._leave is not None:
            await self._leave()
        await asyncio.to_thread(self._services.finisher.close)
        if self._metrics is not None:
            self._metrics.tally.flush()
            metrics.retire(self._services.settings.paths, f"frontend-{self._services.slot}")
        if self._services.store is not None:
            self._services.store.close()
        logs.flush()


async def _start_grpc(services: Services) -> GrpcServer | None:
    """The gRPC server, if enabled. A process without a gRPC server does not import its library."""
    if not services.settings.grpc.enabled:
        return None
    from frontend.grpc.server import GrpcServer
    from frontend.protocols.grpc_services import grpc_services

    server = GrpcServer(services, grpc_services(services))
    await server.start()
    return server
