"""The routes that a gateway has and a single server lacks: status, pools, configurations.

May be imported by `frontend.protocols.registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
from falcon.asgi import Request

from frontend.protocols.gateway import configs, pools
from frontend.protocols.sie import errors
from frontend.route_rows import Route
from frontend.services import Services
from frontend.status.cluster import ClusterFeed
from frontend.status.stream import StreamResource
from ipc.errors import PenstockError

STATUS = "/ws/cluster-status"


def _status(services: Services) -> StreamResource:
    return StreamResource(services, ClusterFeed)


ROUTES = (
    Route("get", STATUS, _status),
    *pools.ROUTES,
    *configs.ROUTES,
)


class GatewayProtocol:
    """Routes of a gateway, with the errors of SIE."""

    name = "gateway"
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ()

    def context(self, services: Services) -> Services:
        """What resources are made from."""
        return services

    def render_error(
        self, error: PenstockError, path: str, req: Request | None = None
    ) -> tuple[int, dict[str, Any] | None, dict[str, str]]:
        """(status, JSON body, headers) of an error, with its message once more for clients of pools."""
        return errors.render_model(error)

    def render_http(
        self, error: falcon.HTTPError, path: str
    ) -> tuple[int, dict[str, Any] | None, dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
