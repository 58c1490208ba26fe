"""Messages in the form of Anthropic, and the count of their tokens.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.messages import errors
from frontend.protocols.messages.messages import PROTOCOL, CountTokensResource, MessagesResource
from frontend.services import Services
from ipc.errors import PenstockError

_ROOT = "/v1/messages"
_COUNT = f"{_ROOT}/count_tokens"
_OPERATIONS = {_ROOT: MessagesResource.operation, _COUNT: CountTokensResource.operation}


class MessagesProtocol:
    """Routes of messages, and the error form of Anthropic for all that is below them."""

    name = PROTOCOL
    prefixes: Sequence[str] = (_ROOT,)

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        app.add_route(_ROOT, MessagesResource(services))
        app.add_route(_COUNT, CountTokensResource(services))

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
