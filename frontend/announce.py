"""The block that a server prints once the start is over: addresses, models, devices, limits, and what is off.

A start without success has a block too, which says what failed and what helps. Should a model be loaded later, the
block of a server that is ready follows.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from typing import Any

from frontend.engine.interface import NONE_LOADED
from frontend.services import Services
from ipc import addresses, logs
from ipc.version import VERSION
from ipc.wire.messages import ModelStatus
from ipc.wire.stats import folded, models_ready

log = logging.getLogger(__name__)

MOST_MODELS = 12
"""Models with a line of their own."""


def summary(services: Services) -> str:
    """One line: models ready and workers up."""
    up = sum(worker.responsive for worker in services.directory.workers())
    return f"{models_ready(_statuses(services))}, {up} workers up"


def is_over(ready: bool, why: str) -> bool:
    """Whether the start is over, by the readiness of the engine: with a model, or without any."""
    return ready or why == NONE_LOADED


def started(services: Services, *, ready: bool = True) -> None:
    """Print the block, as the first frontend of a server that is ready, or whose models all failed.

    In JSON logs the block is one line.
    """
    try:
        os.close(os.open(services.settings.paths.announced(ready=ready), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    text = block(services, ready=ready)
    if logs.is_text(services.settings.log, sys.stderr):
        logs.write(text)
    else:
        line = "; ".join(" ".join(line.split()) for line in text.splitlines())
        log.log(logging.INFO if ready else logging.ERROR, line)


def block(services: Services, *, ready: bool = True) -> str:
    """Text of the block."""
    settings = services.settings
    url = _url(settings.server.bind)
    page = "" if addresses.unix_path(settings.server.bind) else " (in a browser: the live page)"
    head = "is ready" if ready else f"is not ready: {NONE_LOADED}"
    lines = [f"Penstock {VERSION} {head}", f"  url        {url}{page}"]
    if settings.grpc.enabled:
        lines.append(f"  gRPC       {settings.grpc.bind}")
    for what, apart in (("metrics", settings.server.metrics_bind), ("health", settings.server.health_bind)):
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
        "  not built  several hosts",
    ]
    return "\n".join([*lines, *(_example(services, url) if ready else _ways(services))])


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
    told = [status for status in statuses if status.state != "available"]
    lines = []
    for status in told[:MOST_MODELS]:
        device = f" on {status.device}" if status.device else ""
        note = f" ({status.error_class}: {status.error_message})" if status.state == "failed" else ""
        lines.append(f"  model      {status.name}: {status.state}{device}{note}{_generating(status)}")
    if rest := Counter(status.state for status in told[MOST_MODELS:]):
        states = ", ".join(f"{count} {state}" for state, count in rest.items())
        lines.append(f"  models     {rest.total()} more: {states}; see /v1/models")
    if more := len(statuses) - len(told):
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
        return [f"  try        curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d '{body}'"]
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
