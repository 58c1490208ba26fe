"""The routes of ollama beside those of TensorRT Inference Server below /api, and the form of its errors.

May be imported by `frontend.protocols.registry`. Imports the flow of SIE.
"""

from __future__ import annotations

from typing import Any

import falcon
import msgspec

from frontend.protocols.foreign.server import ErrorForm, Rendered, ServerProtocol
from frontend.protocols.ollama.operations import ROUTES, OllamaError
from frontend.protocols.ollama.texts import PROTOCOL, status_of

_UNKNOWN = (
    "there is nothing at this path: /api has the routes of ollama (docs/ollama.md) and those of TensorRT Inference "
    "Server, version 1 (docs/trtis.md)"
)


def _body(status: int, text: str) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(OllamaError(text))
    return body


class OllamaProtocol(ServerProtocol):
    """Routes and error form of ollama: `{"error": message}`, also for all paths below /api that no protocol has."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES, ErrorForm(status_of, _body), folders=("/api",))

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """(status, JSON body, headers) of an error of the framework."""
        if error.status_code == 404:
            return 404, _body(404, _UNKNOWN), {}
        return super().render_http(error, path)
