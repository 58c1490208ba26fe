"""Facts about this machine that decide whether the server can do its work, for `penstock doctor` and for requests.

Each check yields findings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from frontend.access import api_keys
from frontend.server import descriptors
from ipc.errors import ConfigError
from ipc.settings import Settings

Finding = tuple[bool, str]
"""Whether all is fine, and a line for people."""


def shared_memory(config: Settings) -> Iterator[Finding]:
    """Whether the arenas of all workers fit."""
    stat = os.statvfs(config.paths.shm)
    free = stat.f_bavail * stat.f_frsize
    need = config.arena.bytes * config.worker_count
    yield (
        free >= need,
        f"{config.paths.shm}: {free >> 20} MiB free, {need >> 20} MiB needed (arena.bytes x workers)",
    )


def open_files(config: Settings) -> Iterator[Finding]:
    """Whether a process may open as many files as connections are allowed."""
    hard = descriptors.hard_limit()
    grpc = config.grpc.max_connections if config.grpc.enabled else 0
    need = descriptors.wanted((config.server.max_connections, grpc))
    shown = "no limit" if hard < 0 else f"at most {hard}"
    yield (
        hard < 0 or hard >= need,
        f"open files: {shown}, {need} wanted (server.max_connections, grpc.max_connections)",
    )


def keys(config: Settings) -> Iterator[Finding]:
    """Whether callers need keys, and whether the file of keys can be read."""
    if not config.server.keys_file:
        yield (
            True,
            f"API keys: off (server.keys_file is empty); whoever reaches {config.server.bind} may call",
        )
        return
    try:
        entries = api_keys.read(Path(config.server.keys_file))
    except ConfigError as error:
        yield False, f"API keys: {error.message}"
        return
    admins = sum("admin" in entry.scopes for entry in entries)
    yield True, f"API keys: {len(entries)} in {config.server.keys_file}, {admins} with the scope admin"
