"""Rows of the API's description that protocols of generated text share: the form of errors, of usage, of tokens."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation.errors import ErrorAnswer
from frontend.routes import Route, asking


class PromptDetails(msgspec.Struct):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: Annotated[int, Meta(description="Tokens that were found in the prefix cache.")]


class CompletionDetails(msgspec.Struct):
    """Generated tokens that are reasoning."""

    reasoning_tokens: Annotated[int, Meta(description="Generated tokens that are reasoning.")]


class Usage(msgspec.Struct):
    """Token counts, times in seconds, tokens per second."""

    prompt_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    completion_tokens: Annotated[int, Meta(description="Generated tokens.")]
    total_tokens: Annotated[int, Meta(description="Tokens of inputs and answers.")]
    avg_tok_per_sec: Annotated[float, Meta(description="Tokens a second over the whole request.")]
    avg_prompt_tok_per_sec: Annotated[
        float, Meta(description="Tokens of the prompt a second until the first token.")
    ]
    avg_compl_tok_per_sec: Annotated[
        float, Meta(description="Generated tokens a second behind the first token.")
    ]
    total_time_sec: Annotated[float, Meta(description="Seconds of the whole request.")]
    total_prompt_time_sec: Annotated[float, Meta(description="Seconds until the first token.")]
    total_completion_time_sec: Annotated[float, Meta(description="Seconds behind the first token.")]
    prompt_tokens_details: Annotated[PromptDetails, Meta(description="Of the tokens of the inputs.")]
    completion_tokens_details: Annotated[CompletionDetails, Meta(description="Of the generated tokens.")]


FAULTS = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)


def generating(
    path: str,
    resource: Any,
    summary: str,
    tag: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    example: dict[str, Any],
    **more: Any,
) -> Route:
    """The row of a route that generates text in the form of OpenAI, whole or as a stream of events."""
    return asking(
        path,
        resource,
        summary,
        body,
        answer,
        example,
        tag=tag,
        errors=dict.fromkeys(FAULTS, ErrorAnswer),
        error_code_header=False,
        streams=True,
        **more,
    )
