"""The routes of this protocol, one row each, and the answers that the API's description tells of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.generation.described import PromptDetails, generating
from frontend.generation.errors import ErrorAnswer
from frontend.protocols.responses.create import ResponsesResource
from frontend.protocols.responses.requests import ResponseRequest
from frontend.protocols.responses.runs import Runs
from frontend.protocols.responses.store import ResponseStore
from frontend.protocols.responses.stored import (
    CancelResource,
    DeletedResponse,
    InputItems,
    InputItemsResource,
    NotServed,
    StoredResource,
)
from frontend.routes import Parameter, Route
from frontend.services import Services

_ROOT = "/v1/responses"
_ONE = f"{_ROOT}/{{response_id}}"


@dataclass(frozen=True, slots=True)
class Context:
    """What the resources of this protocol are made from."""

    services: Services
    store: ResponseStore
    runs: Runs


class OutputDetails(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: Annotated[int, Meta(description="Generated tokens that are reasoning.")]


class InputDetails(PromptDetails):
    """Prompt tokens that were found in the prefix cache, and those that were written there on purpose."""

    cache_write_tokens: Annotated[int, Meta(description="Always 0: nobody pays for writing.")]


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    input_tokens_details: Annotated[InputDetails, Meta(description="Of the tokens of the inputs.")]
    output_tokens: Annotated[int, Meta(description="Generated tokens.")]
    output_tokens_details: Annotated[OutputDetails, Meta(description="Of the generated tokens.")]
    total_tokens: Annotated[int, Meta(description="Tokens of inputs and answers.")]


class ResponseErrorInfo(msgspec.Struct):
    """Why a response failed."""

    type: Annotated[
        Literal["validation_error", "model_error", "internal_error"],
        Meta(description="Class of the error."),
    ]
    code: Annotated[str, Meta(description="Kind of the error, for programs.")]
    message: Annotated[str, Meta(description="What is said.")]


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Annotated[Literal["max_output_tokens"], Meta(description="Why that is so.")]


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response; `output` has items of types reasoning, message and function_call."""

    id: Annotated[str, Meta(description="Id of the response, by which the response is found later.")]
    object: Annotated[Literal["response"], Meta(description="Names the form of this object.")]
    created_at: Annotated[int, Meta(description="Unix time of the beginning.")]
    completed_at: Annotated[int | msgspec.UnsetType, Meta(description="Unix time of the end.")] = (
        msgspec.UNSET
    )
    status: Annotated[
        Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"],
        Meta(description="The state."),
    ]
    model: Annotated[str, Meta(description="Name of the model.")]
    output: Annotated[
        list[dict[str, Any]], Meta(description="Items of the answer: messages, reasoning, calls.")
    ]
    output_text: Annotated[str | msgspec.UnsetType, Meta(description="All texts of the answer together.")] = (
        msgspec.UNSET
    )
    reasoning: Annotated[str | msgspec.UnsetType, Meta(description="How the model thought.")] = msgspec.UNSET
    usage: Annotated[ResponseUsage | msgspec.UnsetType, Meta(description="Counts of tokens.")] = msgspec.UNSET
    error: Annotated[ResponseErrorInfo | msgspec.UnsetType, Meta(description="What went wrong.")] = (
        msgspec.UNSET
    )
    incomplete_details: Annotated[
        IncompleteDetails | msgspec.UnsetType, Meta(description="Why the answer is not complete.")
    ] = msgspec.UNSET
    background: Annotated[bool, Meta(description="Whether the response goes on without its client.")]
    store: Annotated[bool, Meta(description="Whether the response is kept for later requests.")]
    metadata: Annotated[dict[str, Any], Meta(description="Values of the caller, by name.")]
    parallel_tool_calls: Annotated[
        bool, Meta(description="Whether the model may call several functions at once.")
    ]
    text: Annotated[dict[str, Any], Meta(description="The form of the answer.")]
    tool_choice: Annotated[
        str | dict[str, Any], Meta(description="Whether the model calls functions, and which.")
    ]
    tools: Annotated[
        list[dict[str, Any]], Meta(description="Functions that the model may call, at most 128.")
    ]
    truncation: Annotated[
        Literal["auto", "disabled"],
        Meta(description="`auto`: cut the beginning of a prompt that is too long."),
    ]
    instructions: Annotated[
        str | msgspec.UnsetType, Meta(description="What the model should know before the conversation.")
    ] = msgspec.UNSET
    previous_response_id: Annotated[
        str | msgspec.UnsetType,
        Meta(description="Id of the stored response that the conversation goes on from."),
    ] = msgspec.UNSET
    max_output_tokens: Annotated[
        int | msgspec.UnsetType, Meta(description="Most tokens to generate, at least 1.")
    ] = msgspec.UNSET
    temperature: Annotated[
        float | msgspec.UnsetType,
        Meta(description="Spread of the choice of tokens; 0 or absent: the likeliest token each time."),
    ] = msgspec.UNSET
    top_p: Annotated[
        float | msgspec.UnsetType,
        Meta(description="Keep the likeliest tokens up to this probability together; out of range: off."),
    ] = msgspec.UNSET
    presence_penalty: Annotated[
        float | msgspec.UnsetType, Meta(description="Taken from the logit of each token that has occurred.")
    ] = msgspec.UNSET
    frequency_penalty: Annotated[
        float | msgspec.UnsetType,
        Meta(description="Taken from the logit of a token for each time that the token has occurred."),
    ] = msgspec.UNSET
    top_logprobs: Annotated[
        int | msgspec.UnsetType, Meta(description="Number of alternatives beside each token, 0 to 20.")
    ] = msgspec.UNSET
    session_id: Annotated[
        str | msgspec.UnsetType, Meta(description="The session that the request named.")
    ] = msgspec.UNSET


_WHOLE_NUMBER = {"type": "integer", "minimum": 0}


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
