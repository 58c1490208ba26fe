"""Leave for pages of other sites to use the API (Cross-Origin Resource Sharing, the Fetch standard, section 3.3).

1. A browser asks before it sends JSON or a key to another site: a preflight. The preflight carries no key, so the gate
   lets a preflight in, and this middleware answers without the route.
2. An answer names the origin that may read the answer, also when the answer is an error.
3. `server.cors_origins` says which origins have leave; without any, nothing is sent. Only the paths below have leave:
   those of the tensor protocols, of the metrics and of the live page are none of a page's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import falcon
from falcon.asgi import Request, Response

METHODS = "GET, POST, PUT, DELETE"
REQUEST_HEADERS = (
    "content-type",
    "authorization",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "x-request-id",
)
_OF_SDKS = ("x-stainless-", "anthropic-", "openai-")
"""Beginnings of further headers that the SDKs of OpenAI and Anthropic send from pages."""
_PATHS = ("/v1/", "/health", "/openapi.json", "/api-doc/openapi.json")
_MAX_AGE_S = 600
_ANY = "*"


class CorsMiddleware:
    """Answers preflights and marks answers. Runs after the middleware of ids and before the middleware of keys."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = _ANY in origins
        self._origins = frozenset(origin.lower() for origin in origins)

    async def process_request(self, req: Request, resp: Response) -> None:
        """Answer a preflight of an origin with leave."""
        asked = req.get_header("Access-Control-Request-Method")
        if req.method != "OPTIONS" or asked is None or not self._leave(req):
            return
        resp.status = falcon.HTTP_204
        resp.set_headers(
            {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Allow-Headers": _allowed_headers(req),
                "Access-Control-Max-Age": str(_MAX_AGE_S),
            }
        )
        resp.complete = True

    async def process_response(
        self, req: Request, resp: Response, resource: object, req_succeeded: bool
    ) -> None:
        """Name the origin that may read the answer."""
        if not self._origins or not req.path.startswith(_PATHS):
            return
        if not self._any:
            resp.append_header("Vary", "Origin")
        leave = self._leave(req)
        if leave:
            resp.set_header("Access-Control-Allow-Origin", leave)
            resp.set_header("Access-Control-Expose-Headers", "x-request-id")

    def _leave(self, req: Request) -> str:
        """The value that gives a request's origin leave; "" for none."""
        origin = req.get_header("Origin")
        if origin is None or not req.path.startswith(_PATHS):
            return ""
        if self._any:
            return _ANY
        return origin if origin.lower() in self._origins else ""


def _allowed_headers(req: Request) -> str:
    asked = (req.get_header("Access-Control-Request-Headers") or "").lower().split(",")
    more = {name.strip() for name in asked if name.strip().startswith(_OF_SDKS)} - set(REQUEST_HEADERS)
    return ", ".join((*REQUEST_HEADERS, *sorted(more)))
