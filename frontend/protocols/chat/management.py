"""Routes of the contract beside text: models are unloaded and loaded, the system tells of itself, and what is absent.

1. POST /v1/models/unload, /reload and /status: `{"model_id"}` gives `{"model_id", "status"}`. A failure has the same
   body with a status code of its own: 404 for a model that does not exist, 400 otherwise.
2. GET /v1/system/info has facts of the machine, of the workers' devices and of the build.
3. POST /v1/system/doctor runs the checks of `penstock doctor` that hold for a running server, and looks at workers and
   models.
4. A route that this server does not have says so, with what is missing.
"""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal

import falcon
import msgspec
from falcon.asgi import Request, Response
from msgspec import Meta

from frontend.generation.errors import InvalidField
from frontend.generation.requests import decode, find_generator, model_status, receive
from frontend.http.bodies import until_disconnect
from frontend.http.threads import off_loop
from frontend.scope import RequestScope
from frontend.sending import answer_json
from frontend.services import Services
from frontend.status import health
from ipc import machine
from ipc.errors import DeadlineExceeded, ModelNotFound, PenstockError, Unsupported
from ipc.version import VERSION

Act = Callable[[Services, str, int], Awaitable[str]]


class ModelRequest(msgspec.Struct):
    """Body of the three routes."""

    model_id: Annotated[str, Meta(description="Name of the model.")]


class ControlAnswer(msgspec.Struct, omit_defaults=True):
    """State of a model after what was asked, or why that failed."""

    model_id: Annotated[str, Meta(description="Name of the model.")]
    status: Annotated[str, Meta(description="The state.")]
    error: Annotated[str | None, Meta(description="What went wrong.")] = None


async def unload(services: Services, model: str, deadline_ns: int) -> str:
    """Unload the model from every worker."""
    await services.directory.controlled().unload(model, True, deadline_ns)
    return "unloaded"


async def reload(services: Services, model: str, deadline_ns: int) -> str:
    """Load the model, also after a failure. A load that takes longer than the request goes on."""
    try:
        state = await services.directory.controlled().load(model, True, deadline_ns)
    except DeadlineExceeded:
        state = services.directory.status(model).state
    return model_status(state)


async def status(services: Services, model: str, deadline_ns: int) -> str:
    """Say in which state the model is."""
    return model_status(services.directory.status(model).state)


class ControlResource:
    """One of the three routes, which does `act`."""

    def __init__(self, services: Services, act: Act) -> None:
        self._services, self._act = services, act

    async def on_post(self, req: Request, resp: Response) -> None:
        """Answer with the state of the model."""
        request = await receive(self._services, req, _parsed)
        scope: RequestScope = req.context.penstock
        scope.names(request.model_id)
        code, answer = await until_disconnect(self._run(request.model_id, scope), req.scope)
        resp.status = code
        answer_json(resp, answer)

    async def _run(self, name: str, scope: RequestScope) -> tuple[Any, ControlAnswer]:
        services = self._services
        try:
            entry = find_generator(name, services.directory, services.settings)
            state = await self._act(services, entry.id, scope.deadline_ns)
            return falcon.HTTP_200, ControlAnswer(entry.id, state)
        except ModelNotFound as error:
            return falcon.HTTP_404, ControlAnswer(name, "not_found", error.message)
        except PenstockError as error:
            return falcon.HTTP_400, ControlAnswer(name, "internal_error", error.message)


def _parsed(body: bytes) -> ModelRequest:
    return decode(body, ModelRequest, 1)


class SystemInfo(msgspec.Struct):
    """Facts of the machine, of the workers' devices, and of the build."""

    os: Annotated[str, Meta(description="Operating system.")]
    kernel: Annotated[str, Meta(description="Version of the kernel.")]
    cpu: Annotated[dict[str, Any], Meta(description="The processors.")]
    memory: Annotated[dict[str, int], Meta(description="Main memory.")]
    devices: Annotated[list[dict[str, Any]], Meta(description="Devices of the workers.")]
    build: Annotated[dict[str, str], Meta(description="Version of the server and its libraries.")]
    hf_cache_path: Annotated[str, Meta(description="Where model files of the hub are kept.")]


class Check(msgspec.Struct):
    """One check; `suggestion` says what to do."""

    name: Annotated[str, Meta(description="The name.")]
    status: Annotated[Literal["ok", "warn", "error"], Meta(description="The state.")]
    message: Annotated[str, Meta(description="What is said.")]
    suggestion: Annotated[str | msgspec.UnsetType, Meta(description="What to do.")] = msgspec.UNSET


class Examination(msgspec.Struct):
    """Facts, and all checks."""

    system: Annotated[SystemInfo, Meta(description="The machine.")]
    checks: Annotated[list[Check], Meta(description="What was looked at.")]


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


async def info(services: Services) -> SystemInfo:
    """Facts of the machine, and the devices of the workers."""
    workers = services.directory.workers()
    devices = [{"worker": each.number, "name": each.device, "state": each.state} for each in workers]
    return SystemInfo(devices=devices, **await off_loop(machine_facts))


def findings(services: Services) -> list[Check]:
    """All checks with `name`, `status`, `message`, and a `suggestion` where something is wrong."""
    config = services.settings
    return [
        *(_told("shared_memory", *each) for each in health.shared_memory(config)),
        *(_told("open_files", *each) for each in health.open_files(config)),
        *(_told("keys", *each) for each in health.keys(config)),
        *(_told("workers", *each) for each in _workers(services)),
        *(_told("models", *each) for each in _models(services)),
        _told("sandbox", True, "no sandbox layer is active: this server runs no tools"),
    ]


def _told(name: str, fine: bool, message: str) -> Check:
    return Check(name, "ok", message) if fine else Check(name, "error", message, _ADVICE[name])


def _workers(services: Services) -> Iterator[health.Finding]:
    for worker in services.directory.workers():
        yield (
            worker.responsive,
            f"worker {worker.number} on {worker.device or 'no device yet'} is {worker.state}",
        )


def _models(services: Services) -> Iterator[health.Finding]:
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
        resp.data = msgspec.json.encode(await info(self._services))


class DoctorResource:
    """Checks of the machine and the server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def on_post(self, req: Request, resp: Response) -> None:
        """Facts and checks as JSON; a body is not read."""
        resp.content_type = falcon.MEDIA_JSON
        resp.data = msgspec.json.encode(Examination(await info(self._services), findings(self._services)))


class OtherCategory:
    """A route for models of another category than text."""

    def __init__(self, product: str) -> None:
        self._product = product

    async def on_post(self, req: Request, resp: Response) -> None:
        """422, whatever the body says."""
        raise InvalidField(
            "model",
            f"the request is incompatible with the category of the model, no model here gives {self._product}",
        )


class NotBuilt:
    """A route of a feature that is not built."""

    def __init__(self, feature: str) -> None:
        self._feature = feature

    async def on_post(self, req: Request, resp: Response) -> None:
        """501, whatever the body says."""
        raise Unsupported(f"{self._feature} is not offered by this server")

    on_get = on_post
