"""POST /invocations, and POST / where the server answers like TEI: the route of the task of the one model.

1. The model is the model of `GET /info`: the only served model, or the first of `server.default_models`.
2. Its first output chooses the route, which does all else.
"""

from __future__ import annotations

from typing import Any

from falcon.asgi import Request, Response

from frontend.engine.default_models import default_model
from frontend.engine.scope import RequestScope
from frontend.http.inference import InferenceRoute
from frontend.protocols.tei.embed import EmbedAllResource, EmbedResource, EmbedSparseResource
from frontend.protocols.tei.info import OUTPUTS
from frontend.protocols.tei.predict import ClassesResource
from frontend.protocols.tei.rerank import RerankResource
from frontend.services import Services

_ROUTES: dict[str, type[InferenceRoute]] = {
    "dense": EmbedResource,
    "sparse": EmbedSparseResource,
    "multivector": EmbedAllResource,
    "score": RerankResource,
    "json": ClassesResource,
}


class TaskResource(InferenceRoute):
    """A request in the form of the route that the model is for."""

    operation = "invocations"

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._routes = {output: route(services) for output, route in _ROUTES.items()}

    async def respond(self, req: Request, resp: Response, scope: RequestScope, target: Any) -> None:
        """The answer of that route. Raises `ModelNotFound` where several models could be meant."""
        services = self.services
        entry = services.directory.find(default_model(services.catalog, services.settings, OUTPUTS))
        route = next(route for output, route in self._routes.items() if output in entry.outputs)
        scope.operation = route.operation
        await route.respond(req, resp, scope, target)
