"""Chat and plain completions in the form of OpenAI, and the control of models and the system beside them.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.generation import errors
from frontend.protocols.chat import management
from frontend.protocols.chat.chat import ChatResource
from frontend.protocols.chat.completions import CompletionsResource
from frontend.protocols.chat.envelope import PROTOCOL
from frontend.services import Services
from ipc.errors import PenstockError

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


class ChatProtocol:
    """Routes of chat and completions, and the error form of OpenAI."""

    name = PROTOCOL
    prefixes: Sequence[str] = (
        "/v1/chat",
        "/v1/completions",
        "/v1/images",
        "/v1/audio",
        "/v1/models/unload",
        "/v1/models/reload",
        "/v1/models/status",
        "/v1/system",
        "/calibration",
        *management.NOT_BUILT,
    )

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes; those that load and unload only where administration over HTTP is on."""
        app.add_route("/v1/chat/completions", ChatResource(services))
        app.add_route("/v1/completions", CompletionsResource(services))
        app.add_route("/v1/models/status", management.ControlResource(services, management.status))
        if services.settings.server.admin:
            app.add_route("/v1/models/unload", management.ControlResource(services, management.unload))
            app.add_route("/v1/models/reload", management.ControlResource(services, management.reload))
        app.add_route("/v1/system/info", management.InfoResource(services))
        app.add_route("/v1/system/doctor", management.DoctorResource(services))
        for path, product in management.CATEGORIES.items():
            app.add_route(path, management.OtherCategory(product))
        for path, feature in management.NOT_BUILT.items():
            app.add_route(path, management.NotBuilt(feature))

    def inference_at(self, path: str) -> tuple[str, str]:
        """(operation, "") of `path`: the body names the model."""
        return _OPERATIONS.get(path, ""), ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
