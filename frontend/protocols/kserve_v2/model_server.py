"""GET /v1/config and POST /v1/config/reload of OpenVINO Model Server: states of all models, files read again."""

from __future__ import annotations

import logging
from typing import Any

from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.protocols.kserve_v2 import answers
from frontend.services import Services
from frontend.tensors import served
from frontend.tensors.states import VersionState
from ipc.errors import ConfigError, InvalidInput

log = logging.getLogger(__name__)

_STATES = {"READY": "AVAILABLE", "LOADING": "LOADING", "UNLOADING": "UNLOADING", "UNAVAILABLE": "END"}


class ConfigStatusResource:
    """The states."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response) -> None:
        """All versions of all models by name."""
        self._restrictions.check("model-repository", req.get_header)
        answers.send(resp, _states(self._services))

    on_head = on_get


class ReloadResource:
    """The reload."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_post(self, req: Request, resp: Response) -> None:
        """201 when the files say something new, else 200; the answer is that of `/v1/config`.

        Raises `InvalidInput` for files that are wrong; the models stay as they were.
        """
        self._restrictions.check("model-repository", req.get_header)
        services = self._services
        try:
            changed = await services.follower.reload()
        except ConfigError as error:
            log.error("the changed catalog is refused, the old one stays: %s", error.message)
            raise InvalidInput("the model files have mistakes; the server's log names them") from None
        answers.send(resp, _states(services))
        resp.status = 201 if changed else 200


def _states(services: Services) -> dict[str, Any]:
    return {
        name: {"model_version_status": [_state(state) for state in served.states(services, name)]}
        for name in served.names(services)
    }


def _state(state: VersionState) -> dict[str, Any]:
    failed = bool(state.status.error_class) and state.state != "READY"
    status = {"error_code": "UNKNOWN" if failed else "OK", "error_message": state.reason if failed else "OK"}
    return {"version": str(state.version), "state": _STATES[state.state], "status": status}
