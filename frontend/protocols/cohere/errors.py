"""Errors in the form of Cohere: `{"message"}`, with the statuses of the SIE contract, which Cohere has too."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import falcon

from frontend.protocols.foreign.server import ErrorForm, Rendered
from frontend.protocols.sie import errors
from ipc.errors import PenstockError


class _CohereForm(ErrorForm):
    """Headers are those of the SIE contract too."""

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


FORM = _CohereForm(lambda error: errors.contract_code(error)[0], _body)
"""The form of errors of Cohere."""
