"""Rows of the API's description that protocols of generated text share: the form of errors, of usage, of tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from frontend.openapi.operation import Operation, asking


class ErrorInfo(msgspec.Struct):
    """An error in the form of OpenAI; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """The body of an error; `partial_response` is the answer so far of a model that failed."""

    message: str
    error: ErrorInfo
    partial_response: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class PromptDetails(msgspec.Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts, times in seconds, tokens per second."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    avg_tok_per_sec: float
    avg_prompt_tok_per_sec: float
    avg_compl_tok_per_sec: float
    total_time_sec: float
    total_prompt_time_sec: float
    total_completion_time_sec: float
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


FAULTS = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)


def generating(
    path: str,
    summary: str,
    tag: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    example: dict[str, Any],
) -> Operation:
    """The row of a route that generates text in the form of OpenAI, whole or as a stream of events."""
    return asking(
        path,
        summary,
        body,
        answer,
        example,
        tag=tag,
        errors=dict.fromkeys(FAULTS, ErrorAnswer),
        error_code_header=False,
        streams=True,
    )
