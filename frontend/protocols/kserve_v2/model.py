"""GET /v2/models/{model}[/versions/{version}]: its metadata, readiness and configuration."""

from __future__ import annotations

from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import answers, describing
from frontend.protocols.kserve_v2.configuration import configuration
from frontend.protocols.kserve_v2.paths import Target
from frontend.services import Services
from frontend.tensors import served
from ipc.errors import InvalidInput


class MetadataResource:
    """The model itself."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response, target: Target) -> None:
        """Name, versions, platform, inputs and outputs."""
        self._restrictions.check("metadata", req.get_header)
        answers.send(resp, describing.model_metadata(self._services, target.name, target.version))

    on_head = on_get


class ModelReadyResource:
    """`/ready`."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response, target: Target) -> None:
        """200 when the model answers; else 400 with the reason, also for an unknown one."""
        self._restrictions.check("health", req.get_header)
        states = served.states(self._services, target.name)
        asked = [state for state in states if target.version in (None, state.version)]
        if not any(state.state == "READY" for state in asked):
            why = "; ".join(f"version {one.version} is {one.state} {one.reason}".rstrip() for one in asked)
            named = f"model '{target.name[:200]}'"
            raise InvalidInput(f"{named} is not ready: {why or f'it has no version {target.version}'}")
        answers.send(resp, {"ready": True})

    on_head = on_get


class ConfigResource:
    """`/config`."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response, target: Target) -> None:
        """The configuration of the model."""
        self._restrictions.check("model-config", req.get_header)
        found = served.find(self._services, target.name, target.version)
        answers.send(resp, configuration(target.name, found.config))

    on_head = on_get
