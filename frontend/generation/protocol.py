"""What the protocols of generated text, and of objects stored for clients, share beside their tables of routes.

`TextProtocol` renders errors in the form of OpenAI, or in that of Anthropic where a protocol or a request asks for it.
`stored` is the row of a route over stored objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import falcon
import msgspec
from falcon.asgi import Request

from frontend.generation import anthropic_errors, errors
from frontend.generation.anthropic_errors import MessagesError
from frontend.generation.errors import ErrorAnswer
from frontend.route_rows import Route
from frontend.services import Services
from ipc.errors import PenstockError

BOTH_FORMS: tuple[type[msgspec.Struct], ...] = (ErrorAnswer, MessagesError)
"""Bodies of errors where a header of Anthropic switches the form."""
Rendered = tuple[int, dict[str, Any], dict[str, str]]
"""(status, JSON body, headers) of an error."""


class TextProtocol:
    """The table of routes of one contract. Resources are made from the services of the frontend."""

    def __init__(self, name: str, routes: Sequence[Route], folders: Sequence[str] = ()) -> None:
        self.name, self.routes, self.folders = name, routes, folders

    def context(self, services: Services) -> Any:
        """What resources are made from."""
        return services

    def is_anthropic(self, req: Request | None) -> bool:
        """Whether the error of a request has the form of Anthropic; None: the server refuses the request itself."""
        return False

    def render_error(self, error: PenstockError, path: str, req: Request | None = None) -> Rendered:
        """The form of an error on `path`."""
        return anthropic_errors.render(error) if self.is_anthropic(req) else errors.render(error)

    def render_http(self, error: falcon.HTTPError, path: str) -> Rendered:
        """The form of an error of the framework."""
        return anthropic_errors.render_http(error) if self.is_anthropic(None) else errors.render_http(error)


def stored(
    method: Literal["get", "post", "delete"],
    path: str,
    resource: Any,
    summary: str,
    answer: Any,
    *,
    tag: str,
    statuses: tuple[int, ...] = (),
    faults: tuple[type[msgspec.Struct], ...] = (ErrorAnswer,),
    **more: Any,
) -> Route:
    """The row of a route over objects that are kept for clients; `statuses` are further errors."""
    known = (400, 401, 403, 404, 422, 429, 503, *statuses)
    return Route(
        method,
        path,
        resource,
        summary,
        tag,
        answer=answer,
        errors=dict.fromkeys(known, faults if len(faults) > 1 else faults[0]),
        error_code_header=False,
        **more,
    )
