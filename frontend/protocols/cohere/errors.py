"""Errors in the form of Cohere: `{"message"}`, with the statuses of the SIE contract, which are those of Cohere."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import falcon

from frontend.protocols.sie import errors
from ipc.errors import PenstockError


def render(error: PenstockError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error."""
    status, _, headers = errors.render(error)
    return status, {"message": error.message}, headers


def render_http(error: falcon.HTTPError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of an error of the framework, such as a wrong method."""
    message = error.description or error.title or HTTPStatus(error.status_code).phrase
    return error.status_code, {"message": message}, {}
