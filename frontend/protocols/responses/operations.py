"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from frontend.generation.described import ErrorAnswer, PromptDetails, generating
from frontend.openapi.operation import Operation, Parameter
from frontend.protocols.responses.requests import ResponseRequest


class OutputDetails(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseErrorInfo(msgspec.Struct):
    """Why a response failed."""

    type: Literal["validation_error", "model_error", "internal_error"]
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """A response; `output` has items of types reasoning, message and function_call."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | msgspec.UnsetType = msgspec.UNSET
    status: Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    output_text: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    usage: ResponseUsage | msgspec.UnsetType = msgspec.UNSET
    error: ResponseErrorInfo | msgspec.UnsetType = msgspec.UNSET
    incomplete_details: IncompleteDetails | msgspec.UnsetType = msgspec.UNSET
    background: bool
    store: bool
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["auto", "disabled"]
    instructions: str | msgspec.UnsetType = msgspec.UNSET
    previous_response_id: str | msgspec.UnsetType = msgspec.UNSET
    max_output_tokens: int | msgspec.UnsetType = msgspec.UNSET
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET
    presence_penalty: float | msgspec.UnsetType = msgspec.UNSET
    frequency_penalty: float | msgspec.UnsetType = msgspec.UNSET
    top_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    session_id: str | msgspec.UnsetType = msgspec.UNSET


class DeletedResponse(msgspec.Struct):
    """A response that is not stored any more."""

    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class InputItems(msgspec.Struct):
    """A page of the input of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None


PATH = "/v1/responses/{response_id}"
_WHOLE_NUMBER = {"type": "integer", "minimum": 0}


def _stored(
    method: Literal["get", "post", "delete"],
    path: str,
    summary: str,
    answer: type[msgspec.Struct],
    *parameters: Parameter,
    streams: bool = False,
) -> Operation:
    return Operation(
        method,
        path,
        summary,
        "responses",
        answer=answer,
        errors=dict.fromkeys((401, 403, 404, 422, 429, 503), ErrorAnswer),
        error_code_header=False,
        parameters=parameters,
        streams=streams,
    )


OPERATIONS = (
    generating(
        "/v1/responses",
        "Make a response, in the form of OpenAI: whole, as a stream, or in the background.",
        "responses",
        ResponseRequest,
        ResponseAnswer,
        {"model": "default", "input": "Hello", "max_output_tokens": 64},
    ),
    _stored(
        "get",
        PATH,
        "A stored response, as it is now or as a stream of its events.",
        ResponseAnswer,
        Parameter("stream", "query", "Whether to answer with the events.", {"type": "boolean"}),
        Parameter("starting_after", "query", "Number of the last event that the client has.", _WHOLE_NUMBER),
        streams=True,
    ),
    _stored("delete", PATH, "Delete a stored response; one that runs ends.", DeletedResponse),
    _stored("post", f"{PATH}/cancel", "Cancel a response that runs in the background.", ResponseAnswer),
    _stored(
        "get",
        f"{PATH}/input_items",
        "The input of a stored response, a page at a time.",
        InputItems,
        Parameter("after", "query", "Id of the last item of the page before."),
        Parameter(
            "limit", "query", "Most items of a page.", {"type": "integer", "minimum": 1, "maximum": 100}
        ),
        Parameter("order", "query", "Newest or oldest first.", {"type": "string", "enum": ["desc", "asc"]}),
    ),
)
