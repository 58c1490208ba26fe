"""KServe v2 (the open inference protocol) over REST, with binary tensors and extensions; `grpc` is the same over gRPC.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.kserve_v2 import errors
from frontend.protocols.kserve_v2.infer import InferResource
from frontend.protocols.kserve_v2.routes import ROUTES, Context
from frontend.route_rows import Route
from frontend.services import Services
from ipc.errors import PenstockError


class KserveProtocol:
    """Routes and error form of KServe v2."""

    name = "kserve"
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ()

    def context(self, services: Services) -> Context:
        """What resources are made from."""
        return Context(services, InferResource(services, services.restrictions))

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        return errors.render(error, path)

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error, path)
