"""GET /v1/system/info and POST /v1/system/doctor: what this machine is, and whether the server can do its work.

1. `info` has facts of the machine, of the workers' devices and of the build.
2. `doctor` runs the checks of `penstock doctor` that hold for a running server, and looks at workers and models.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import falcon
import orjson
from falcon.asgi import Request, Response

from frontend.http.rendering import off_loop
from frontend.services import Services
from frontend.status import checks
from ipc import machine
from ipc.version import VERSION

_ADVICE = {
    "shared_memory": "make the file system of shared memory larger, or arena.bytes smaller",
    "open_files": "raise the hard limit of open files, or allow fewer connections",
    "keys": "mend the file that server.keys_file names",
    "workers": "read the log of the supervisor: why a worker is not up stands there",
    "models": "read the error of the model, mend its catalog entry or its files, and reload it",
}


def machine_facts() -> dict[str, Any]:
    """Facts of the machine. Reads files of the kernel, which may take milliseconds."""
    return {
        "os": platform.system(),
        "kernel": platform.release(),
        "cpu": {
            "name": machine.processor_name(),
            "cores": machine.available_cores(),
            "arch": platform.machine(),
        },
        "memory": {"total_bytes": machine.memory_nbytes(), "available_bytes": machine.free_memory_nbytes()},
        "build": {"version": VERSION, "python": platform.python_version()},
        "hf_cache_path": str(machine.hub_cache()),
    }


async def info(services: Services) -> dict[str, Any]:
    """Facts of the machine, and the devices of the workers."""
    workers = services.directory.workers()
    devices = [{"worker": each.slot, "name": each.name, "state": each.state} for each in workers]
    return {**await off_loop(machine_facts), "devices": devices}


def findings(services: Services) -> list[dict[str, Any]]:
    """All checks with `name`, `status`, `message`, and a `suggestion` where something is wrong."""
    config = services.settings
    return [
        *(_told("shared_memory", *each) for each in checks.shared_memory(config)),
        *(_told("open_files", *each) for each in checks.open_files(config)),
        *(_told("keys", *each) for each in checks.keys(config)),
        *(_told("workers", *each) for each in _workers(services)),
        *(_told("models", *each) for each in _models(services)),
        _told("sandbox", True, "no sandbox layer is active: this server runs no tools"),
    ]


def _told(name: str, fine: bool, message: str) -> dict[str, Any]:
    told = {"name": name, "status": "ok" if fine else "error", "message": message}
    return told if fine else told | {"suggestion": _ADVICE[name]}


def _workers(services: Services) -> Iterator[checks.Finding]:
    for worker in services.directory.workers():
        yield worker.responsive, f"worker {worker.slot} on {worker.name or 'no device yet'} is {worker.state}"


def _models(services: Services) -> Iterator[checks.Finding]:
    failed = 0
    for entry in services.catalog.entries:
        status = services.directory.status(entry.id)
        if status.state == "failed":
            failed += 1
            yield False, f"model '{entry.id}': {status.error_message}"
    yield True, f"{len(services.catalog)} models are served, the last load of {failed} failed"


class InfoResource:
    """Facts of the machine."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_get(self, req: Request, resp: Response) -> None:
        """The facts as JSON."""
        resp.content_type = falcon.MEDIA_JSON
        resp.data = orjson.dumps(await info(self._services))


class DoctorResource:
    """Checks of the machine and the server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """Facts and checks as JSON; a body is not read."""
        resp.content_type = falcon.MEDIA_JSON
        examined = {"system": await info(self._services), "checks": findings(self._services)}
        resp.data = orjson.dumps(examined)
