"""POST /v2/repository/index, and load and unload of a model by name."""

from __future__ import annotations

import re
from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.access.restricted import Restrictions
from frontend.http.disconnect import until_disconnect
from frontend.protocols.kserve_v2 import answers
from frontend.protocols.kserve_v2.schemas import CONTROL, INDEX
from frontend.services import Services
from ipc.errors import Unsupported

MOST_CONFIG_NBYTES = 4 << 20
"""Largest body of a load that brings no files: a configuration as text within JSON."""
_INDEX = re.compile(r"(?:[^/]+/)?index/?")
_CONTROL = re.compile(
    r"(?:(?P<repository>[^/]+)/)??models/(?P<model>.+)/(?P<action>load|unload)/?", re.DOTALL
)


class RepositoryResource:
    """Everything below /v2/repository."""

    def __init__(self, services: Services, restrictions: Restrictions) -> None:
        self._services, self._restrictions = services, restrictions

    async def on_get(self, req: Request, resp: Response, tail: str) -> None:
        """None of the paths has a GET."""
        if _INDEX.fullmatch(tail) or _CONTROL.fullmatch(tail):
            raise falcon.HTTPMethodNotAllowed(["POST"])
        raise falcon.HTTPNotFound

    async def on_post(self, req: Request, resp: Response, tail: str) -> None:
        """By what the path ends with."""
        self._restrictions.check("model-repository", req.get_header)
        if _INDEX.fullmatch(tail):
            await self._index(req, resp)
            return
        found = _CONTROL.fullmatch(tail)
        if found is None:
            raise falcon.HTTPNotFound
        if found["repository"]:
            raise Unsupported("'repository_name' is not supported: a server has one repository")
        await self._control(req, found["model"], found["action"])
        answers.send_empty(resp)

    async def _index(self, req: Request, resp: Response) -> None:
        asked = await answers.body_of(self._services, req, INDEX)
        entries = []
        for entry in self._services.extensions.control.index(asked.ready):
            made: dict[str, Any] = {"name": entry.name, "version": str(entry.version), "state": entry.state}
            if entry.reason:
                made["reason"] = entry.reason
            entries.append(made)
        answers.send(resp, entries)

    async def _control(self, req: Request, model: str, action: str) -> None:
        control = self._services.extensions.control
        most_nbytes = MOST_CONFIG_NBYTES if action == "load" else answers.SMALL_NBYTES
        if action == "load" and self._services.settings.repository.allow_files:
            most_nbytes = max(most_nbytes, self._services.settings.limits.max_body_bytes)
        asked = await answers.body_of(self._services, req, CONTROL, most_nbytes)
        deadline_ns = req.context.penstock.deadline_ns
        if action == "unload":
            await control.unload(model, asked.parameters, deadline_ns)
            return
        loading = control.load(model, asked.parameters, deadline_ns)
        await until_disconnect(loading, req.scope)
