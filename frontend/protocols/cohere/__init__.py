"""Embed in the forms of Cohere's API, versions 1 and 2, and rerank in the form of version 2, over the flow of SIE.

May be imported by `frontend.protocols.registry` and `frontend.openapi`. Imports the flow of SIE.
"""

from __future__ import annotations

from frontend.http.inference import InferenceRoute
from frontend.protocols.cohere import errors
from frontend.protocols.cohere.embed import EmbedResource, EmbedV1Resource
from frontend.protocols.cohere.rerank import RerankV2Resource
from frontend.protocols.foreign.server import ServerProtocol

_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/v1/embed": EmbedV1Resource,
    "/v2/embed": EmbedResource,
    "/v2/rerank": RerankV2Resource,
}


class CohereProtocol(ServerProtocol):
    """Routes and error form of Cohere; `/v1/rerank` is a route of SIE and answers in both forms."""

    def __init__(self) -> None:
        super().__init__("cohere", _INFERENCE, errors.FORM)
