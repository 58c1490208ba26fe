"""Embed in the forms of Cohere's API, versions 1 and 2, rerank in the form of version 2, and the form of its errors.

May be imported by `frontend.protocols.registry` and `frontend.protocols.tables`. Imports the flow of SIE.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import falcon

from frontend.protocols.cohere.routes import EmbedResource, EmbedV1Resource, RerankV2Resource
from frontend.protocols.foreign.server import ErrorForm, Rendered, ServerProtocol
from frontend.protocols.sie import errors
from frontend.resources.sending import InferenceRoute
from ipc.errors import PenstockError


class _CohereForm(ErrorForm):
    """`{"message"}`, with the statuses and headers of the SIE contract, which Cohere has too."""

    def render(self, error: PenstockError) -> Rendered:
        """An error of a request."""
        status, _, headers = errors.render(error)
        return status, self.body(status, error.message), headers

    def render_http(self, error: falcon.HTTPError) -> Rendered:
        """An error of the framework, such as a wrong method."""
        message = error.description or error.title or HTTPStatus(error.status_code).phrase
        return error.status_code, self.body(error.status_code, message), {}


def _body(status: int, text: str) -> dict[str, Any]:
    return {"message": text}


_FORM = _CohereForm(lambda error: errors.contract_code(error)[0], _body)


_INFERENCE: dict[str, type[InferenceRoute]] = {
    "/v1/embed": EmbedV1Resource,
    "/v2/embed": EmbedResource,
    "/v2/rerank": RerankV2Resource,
}


class CohereProtocol(ServerProtocol):
    """Routes and error form of Cohere; `/v1/rerank` is a route of SIE and answers in both forms."""

    def __init__(self) -> None:
        super().__init__("cohere", _INFERENCE, _FORM)
