"""Responses in the form of OpenAI: whole, streamed, in the background, and stored for later requests.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from frontend.generation.errors import ErrorAnswer, generating
from frontend.generation.protocol import TextProtocol
from frontend.protocols.responses.output import ResponseAnswer
from frontend.protocols.responses.requests import LOGS, ResponseRequest
from frontend.protocols.responses.resources import (
    CancelResource,
    DeletedResponse,
    InputItems,
    InputItemsResource,
    NotServed,
    ResponsesResource,
    StoredResource,
)
from frontend.protocols.responses.runs import PROTOCOL, Runs
from frontend.protocols.responses.store import ResponseStore
from frontend.route_rows import Parameter, Route
from frontend.services import Services

_ROOT = "/v1/responses"
_ONE = f"{_ROOT}/{{response_id}}"
_WHOLE_NUMBER = {"type": "integer", "minimum": 0}


@dataclass(frozen=True, slots=True)
class Context:
    """What the resources of this protocol are made from."""

    services: Services
    store: ResponseStore
    runs: Runs


def _stored(
    method: Literal["get", "post", "delete"],
    path: str,
    resource: Any,
    summary: str,
    answer: type[msgspec.Struct],
    *parameters: Parameter,
    streams: bool = False,
) -> Route:
    return Route(
        method,
        path,
        resource,
        summary,
        "responses",
        answer=answer,
        errors=dict.fromkeys((401, 403, 404, 422, 429, 503), ErrorAnswer),
        error_code_header=False,
        parameters=parameters,
        streams=streams,
    )


def _stored_resource(context: Context) -> StoredResource:
    return StoredResource(context.services, context.store)


def _input_items(context: Context) -> InputItemsResource:
    return InputItemsResource(context.store)


ROUTES = (
    generating(
        _ROOT,
        lambda context: ResponsesResource(context.services, context.store, context.runs),
        "Make a response, in the form of OpenAI: whole, as a stream, or in the background.",
        "responses",
        ResponseRequest,
        ResponseAnswer,
        {"model": "default", "input": "Hello", "max_output_tokens": 64},
        operation=ResponsesResource.operation,
    ),
    _stored(
        "get",
        _ONE,
        _stored_resource,
        "A stored response, as it is now or as a stream of its events.",
        ResponseAnswer,
        Parameter("stream", "query", "Whether to answer with the events.", {"type": "boolean"}),
        Parameter("starting_after", "query", "Number of the last event that the client has.", _WHOLE_NUMBER),
        Parameter("include", "query", f"`{LOGS}`: items of code with their output; all else is ignored."),
        streams=True,
    ),
    _stored(
        "delete", _ONE, _stored_resource, "Delete a stored response; one that runs ends.", DeletedResponse
    ),
    _stored(
        "post",
        f"{_ONE}/cancel",
        lambda context: CancelResource(context.store),
        "Cancel a response that runs in the background.",
        ResponseAnswer,
    ),
    _stored(
        "get",
        f"{_ONE}/input_items",
        _input_items,
        "The input of a stored response, a page at a time.",
        InputItems,
        Parameter("after", "query", "Id of the last item of the page before."),
        Parameter(
            "limit", "query", "Most items of a page.", {"type": "integer", "minimum": 1, "maximum": 100}
        ),
        Parameter("order", "query", "Newest or oldest first.", {"type": "string", "enum": ["desc", "asc"]}),
    ),
    *(Route("post", f"{_ROOT}/{name}", lambda _: NotServed()) for name in ("compact", "input_tokens")),
)


class ResponsesProtocol(TextProtocol):
    """Routes of responses."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES)

    def context(self, services: Services) -> Context:
        """What resources are made from; they share one store."""
        store = ResponseStore(lambda: services.state.place, services.settings.responses)
        runs = Runs(services, store)
        services.lasting.append(runs.watch)
        return Context(services, store, runs)
