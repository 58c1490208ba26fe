"""Messages in the form of Anthropic, and the count of their tokens.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.messages import messages
from frontend.protocols.messages.messages import PROTOCOL
from frontend.protocols.messages.operations import ROUTES
from frontend.routes import Route
from frontend.services import Services
from ipc.errors import PenstockError


class MessagesProtocol:
    """Routes of messages, and the error form of Anthropic for all that is below them."""

    name = PROTOCOL
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ()

    def context(self, services: Services) -> Services:
        """What resources are made from."""
        return services

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return messages.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return messages.render_http(error)
