"""The routes that a gateway has and a single server lacks: status of the cluster, pools. Configurations say 501.

May be imported by `frontend.protocols.registry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
from falcon.asgi import Request, Response

from frontend.protocols.gateway import pools
from frontend.protocols.sie import errors
from frontend.route_rows import Route
from frontend.services import Services
from frontend.status.cluster import ClusterFeed
from frontend.status.stream import StreamResource
from ipc.errors import PenstockError, Unsupported

STATUS = "/ws/cluster-status"
_CONFIGS = "configurations: boxes of this version read their models from their own catalogs (catalog.dirs)"


class NotBuilt:
    """A path of SIE's gateway for which there is nothing yet."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def on_get(self, req: Request, resp: Response, **_: str) -> None:
        """Raises `Unsupported`."""
        raise Unsupported(f"not built: {self._why}")

    on_post = on_put = on_delete = on_get


def _not_built(path: str, why: str) -> Route:
    return Route("get", path, lambda _: NotBuilt(why))


def _status(services: Services) -> StreamResource:
    return StreamResource(services, ClusterFeed)


ROUTES = (
    Route("get", STATUS, _status),
    *pools.ROUTES,
    _not_built("/v1/configs", _CONFIGS),
    _not_built("/v1/configs/{name:path}", _CONFIGS),
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
