"""KServe v2 (the open inference protocol) over REST, with binary tensors and extensions; `grpc` is the same over gRPC.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.kserve_v2 import errors, routes
from frontend.services import Services
from ipc.errors import PenstockError


class KserveProtocol:
    """Routes and error form of KServe v2."""

    name = "kserve"
    prefixes: Sequence[str] = ("/v2", "/v1/config")

    def mount(self, app: falcon.asgi.App[Any, Any], services: Services) -> None:
        """Add the routes."""
        routes.mount(app, services)

    def inference_at(self, path: str) -> tuple[str, str]:
        """(operation, "") of `path`: the model is looked up after the request is let in."""
        return ("infer" if path.endswith("/infer") else ""), ""

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error, path)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error, path)
