"""The SIE dialect: encode, score, extract, models, and embeddings and rerank in the forms of other APIs.

May be imported by `frontend.protocols.registry` and `server_routes`, and by forms of other servers over its flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import falcon
import falcon.asgi

from frontend.protocols.sie import errors
from frontend.protocols.sie.operations import MODEL_FORM, OPENAI_FORM, ROUTES
from frontend.routes import Route
from frontend.services import Services
from ipc.errors import PenstockError, ResourceExhausted


def is_own_client(req: falcon.asgi.Request) -> bool:
    """Whether a client library of SIE sent the request, by its version header or its user agent."""
    agent = (req.get_header("User-Agent") or "").lower()
    return req.get_header("X-SIE-SDK-Version") is not None or any(name in agent for name in _PACKAGES)


_PACKAGES = ("sie-sdk", "sie_sdk")


def _renderer(path: str) -> errors.Render:
    """The form of errors on `path`."""
    if path in OPENAI_FORM:
        return errors.render_openai
    return errors.render_model if path.startswith(MODEL_FORM) else errors.render


class SieProtocol:
    """Routes and error form of the SIE contract."""

    name = "sie"
    routes: Sequence[Route] = ROUTES
    folders: Sequence[str] = ()

    def __init__(self) -> None:
        self._exhausted_retry_s: float | None = None

    def context(self, services: Services) -> Services:
        """What resources are made from."""
        self._exhausted_retry_s = services.settings.limits.exhausted_retry_s
        return services

    def render_error(
        self, error: PenstockError, path: str, req: falcon.asgi.Request | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error on `path`."""
        if isinstance(error, ResourceExhausted) and error.retry_after_s is None:
            error.retry_after_s = self._exhausted_retry_s
        return _renderer(path)(error, req is not None and is_own_client(req))

    def render_http(self, error: falcon.HTTPError, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON body, headers) of an error of the framework."""
        return errors.render_http(error)
