"""Responses in the form of OpenAI: whole, streamed, in the background, and stored for later requests.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.generation import errors
from frontend.protocols.responses.operations import ROUTES, Context
from frontend.protocols.responses.runs import PROTOCOL, Runs
from frontend.protocols.responses.store import ResponseStore
from frontend.routes import Route
from frontend.services import Services
from ipc.errors import PenstockError


class ResponsesProtocol:
    """Routes of responses, and the error form of OpenAI."""

    name = PROTOCOL
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ()

    def context(self, services: Services) -> Context:
        """What resources are made from; they share one store."""
        store = ResponseStore(services.settings.state_root, services.settings.responses)
        return Context(services, store, Runs(services, store))

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
