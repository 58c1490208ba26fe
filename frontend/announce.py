"""The one start-up block: where the server is, what it serves on what, its limits, and what is off."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from frontend.services import Services
from frontend.version import VERSION
from ipc.paths import RunPaths


def summary(services: Services) -> str:
    """One line: models ready and workers up."""
    states = [services.engine.status(name).state for name in services.catalog]
    up = sum(1 for channel in services.client.channels if channel.responsive)
    return f"{states.count('loaded')}/{len(states)} models ready, {up} workers up"


def started(services: Services) -> None:
    """Print the block, once in the life of a server: the first ready frontend does."""
    try:
        os.close(os.open(_marker(services.settings.paths), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    sys.stderr.write(block(services) + "\n")
    sys.stderr.flush()


def forget(paths: RunPaths) -> None:
    """A server starts: its block has not been printed, whatever an earlier one did."""
    _marker(paths).unlink(missing_ok=True)


def _marker(paths: RunPaths) -> Path:
    return paths.root / "announced"


def block(services: Services) -> str:
    """Text of the block."""
    settings = services.settings
    host, _, port = settings.server.bind.rpartition(":")
    url = f"http://{'localhost' if host in ('0.0.0.0', '127.0.0.1', '[::]', '') else host}:{port}"
    lines = [f"Penstock {VERSION} is ready", f"  url        {url}"]
    for name in services.catalog:
        status = services.engine.status(name)
        note = f" ({status.error_class}: {status.error_message})" if status.state == "failed" else ""
        lines.append(f"  model      {name}: {status.state} on {status.device or '-'}{note}")
    for channel in services.client.channels:
        lines.append(
            f"  worker {channel.slot}   {channel.device}, {channel.threads} threads, "
            f"{settings.arena.bytes >> 20} MiB arena"
        )
    limits = settings.limits
    lines += [
        f"  limits     body {limits.max_body_bytes >> 20} MiB, {limits.max_items} items, "
        f"text {limits.max_text_bytes >> 10} KiB, request {limits.request_timeout_s:g} s",
        f"  frontends  {settings.frontend_count}; run directory {settings.paths.root}",
        f"  off        API keys, tracing{'' if settings.worker.trust_remote_code else ', remote code'}",
        "  not built  sparse and multivector outputs, score, extract, status page, KServe v2, TRTIS v1, chat",
    ]
    return "\n".join(lines)
