"""The TensorRT Inference Server API, version 1, over HTTP; `grpc` is the same over gRPC.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.trtis_v1.requests import one_line
from frontend.protocols.trtis_v1.routes import OCTETS, RESPONSE_HEADER, ROUTES, STATUS_HEADER, Context
from frontend.protocols.trtis_v1.statuses import Statuses, http_status_of, retry_after
from frontend.route_rows import Route
from frontend.services import Services
from ipc.errors import PenstockError

_INFER_FOLDERS = tuple(f"{route.stem}/" for route in ROUTES if route.operation)


class TrtisProtocol:
    """Routes and error form of this contract."""

    name = "trtis_v1"
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ("/api/modelcontrol", "/api/repository", "/api/sharedmemorycontrol")

    def __init__(self) -> None:
        self._statuses: Statuses | None = None

    def context(self, services: Services) -> Context:
        """What resources are made from; they share the numbers of requests."""
        self._statuses = Statuses(services.settings)
        return Context(services, self._statuses)

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any] | None, dict[str, str]]:
        """An empty body; the reason is in NV-Status."""
        assert self._statuses is not None
        status = self._statuses.failure(error, numbered=False)
        headers = {STATUS_HEADER: one_line(status), **retry_after(error)}
        if path.startswith(_INFER_FOLDERS):
            headers |= {RESPONSE_HEADER: "", "Content-Type": OCTETS}
        return http_status_of(error), None, headers

    def render_http(
        self, error: falcon.HTTPError, path: str
    ) -> tuple[int, dict[str, Any] | None, dict[str, str]]:
        """405 for a wrong verb, else 400, without body and NV-Status; faults below routing keep their status."""
        known = (405, 426, 431, 408)
        return error.status_code if error.status_code in known else 400, None, dict(error.headers or {})
