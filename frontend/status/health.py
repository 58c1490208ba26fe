"""The health of the server in words for people: whether all workers serve, and whether all models could be loaded.

    ready       every worker serves, and no model has failed
    degraded    traffic is accepted, but a worker, a model, the tool host or room for files is missing
    starting    no worker has served yet; some model may have failed while others load
    down        nothing serves: all workers are lost, or no model could be loaded
    draining    this frontend finishes its requests and takes no new requests

The frontend that builds the frame learns of a death from the pidfd of the worker, so the next frame tells the death.

Checks of this machine find facts that decide whether the server can do its work, for `penstock doctor` and for
requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frontend.access import api_keys
from frontend.engine.interface import WorkerView
from frontend.server.state import files_for, hard_limit
from ipc.errors import ConfigError
from ipc.settings import Settings

_KINDS = {
    "down": ("is down", "are down", "restarting"),
    "silent": ("does not answer", "do not answer", "requests go to other workers"),
    "leaving": ("is stopping", "are stopping", "finishing its requests"),
    "absent": ("has not started yet", "have not started yet", ""),
    "loading": ("is loading its first models", "are loading their first models", ""),
}
"""By kind of trouble: the words for one worker, for several workers, and what happens about the trouble."""


LOST = ("down", "silent", "leaving")
"""Kinds of trouble of workers that have served before; the other workers begin."""
BESIDE = frozenset(("tools", "state"))
"""Kinds of trouble of tools and files, whatever becomes of workers and models."""
Finding = tuple[bool, str]
"""Whether all is fine, and a line for people."""


class Problem(NamedTuple):
    """A trouble of workers, models, tools or files. `since` in Unix seconds; 0 where nobody knows."""

    kind: str
    text: str
    since: float = 0.0
    note: str = ""


def trouble(worker: WorkerView) -> str:
    """The kind of trouble of a worker; empty for a worker that serves."""
    if worker.state == "leaving":
        return "leaving"
    if worker.state != "ready":
        return "down" if worker.since else "absent"
    if not worker.responsive:
        return "silent"
    return "" if worker.preloaded else "loading"


def problems(workers: Sequence[WorkerView], expected: int, models: Sequence[dict[str, Any]]) -> list[Problem]:
    """All problems, problems of workers first. `expected` workers are configured; `models` are fields of the frame."""
    total = max(expected, len(workers))
    since_by_trouble: dict[str, list[float]] = {}
    for worker in workers:
        since_by_trouble.setdefault(trouble(worker), []).append(worker.since)
    since_by_trouble.setdefault("absent", []).extend([0.0] * (total - len(workers)))
    listed = [
        _of_workers(kind, since_by_trouble[kind], total) for kind in _KINDS if since_by_trouble.get(kind)
    ]
    return listed + _of_models([model for model in models if model["state"] == "failed"])


def _of_workers(kind: str, since: list[float], total: int) -> Problem:
    one, many, note = _KINDS[kind]
    subject = "The only worker" if total == 1 else f"{len(since)} of {total} workers"
    return Problem(kind, f"{subject} {one if len(since) == 1 else many}", min(since), note)


def _of_models(failed: list[dict[str, Any]]) -> list[Problem]:
    if not failed:
        return []
    if len(failed) > 1:
        return [Problem("model", f"{len(failed)} models could not be loaded")]
    error = failed[0]["last_error"] or {}
    return [Problem("model", f"Model {failed[0]['name']} could not be loaded", note=error.get("code") or "")]


def health_fields(ready: bool, why: str, found: Sequence[Problem]) -> dict[str, Any]:
    """`state` as above, `why` while no traffic is accepted, and `problems`, the gravest first."""
    if ready:
        state = "degraded" if found else "ready"
    elif why == "draining":
        state = "draining"
    else:
        kinds = {problem.kind for problem in found} - BESIDE
        begins = kinds.isdisjoint(LOST) and kinds != {"model"}
        state = "starting" if begins else "down"
    return {
        "state": state,
        "why": "" if ready else why,
        "problems": [problem._asdict() for problem in found],
    }


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
    hard = hard_limit()
    grpc = config.grpc.max_connections if config.grpc.enabled else 0
    need = files_for((config.server.max_connections, grpc))
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
