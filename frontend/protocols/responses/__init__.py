"""Responses in the form of OpenAI: whole, streamed, in the background, and stored for later requests.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.generation import errors
from frontend.protocols.responses.create import ResponsesResource
from frontend.protocols.responses.runs import PROTOCOL, Runs
from frontend.protocols.responses.store import ResponseStore
from frontend.protocols.responses.stored import CancelResource, InputItemsResource, NotServed, StoredResource
from frontend.services import Services
from ipc.errors import PenstockError

PATH = "/v1/responses"
NOT_SERVED = (f"{PATH}/compact", f"{PATH}/input_tokens")


class ResponsesProtocol:
    """Routes of responses, and the error form of OpenAI."""

    name = PROTOCOL
    prefixes: Sequence[str] = (PATH,)

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        settings = services.settings
        store = ResponseStore(settings.state_root, settings.responses)
        app.add_route(PATH, ResponsesResource(services, store, Runs(services, store)))
        for path in NOT_SERVED:
            app.add_route(path, NotServed())
        app.add_route(f"{PATH}/{{response_id}}", StoredResource(services, store))
        app.add_route(f"{PATH}/{{response_id}}/cancel", CancelResource(store))
        app.add_route(f"{PATH}/{{response_id}}/input_items", InputItemsResource(store))

    def inference_at(self, path: str) -> tuple[str, str]:
        """(operation, "") of `path`: the body names the model."""
        return ResponsesResource.operation if path == PATH else "", ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
