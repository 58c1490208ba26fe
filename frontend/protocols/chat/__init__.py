"""Chat and plain completions in the form of OpenAI, and the control of models and the system beside them.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.generation import errors
from frontend.protocols.chat.chat import PROTOCOL
from frontend.protocols.chat.operations import FOLDERS, ROUTES
from frontend.routes import Route
from frontend.services import Services
from ipc.errors import PenstockError


class ChatProtocol:
    """Routes of chat and completions, and the error form of OpenAI."""

    name = PROTOCOL
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = FOLDERS

    def context(self, services: Services) -> Services:
        """What resources are made from."""
        return services

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
