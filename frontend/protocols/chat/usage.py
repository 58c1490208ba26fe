"""Counts of tokens and times of an answer, in the form of OpenAI with the times that the contract adds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from frontend.engine.events import Ended


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


def usage_of(ended: Ended) -> Usage:
    """Token counts, times in seconds, and tokens per second (0 where no time passed)."""
    total = ended.prompt_tokens + ended.completion_tokens
    total_s = ended.prompt_s + ended.completion_s
    return Usage(
        ended.prompt_tokens,
        ended.completion_tokens,
        total,
        _rate(total, total_s),
        _rate(ended.prompt_tokens, ended.prompt_s),
        _rate(ended.completion_tokens, ended.completion_s),
        round(total_s, 6),
        round(ended.prompt_s, 6),
        round(ended.completion_s, 6),
        PromptDetails(ended.cached_tokens),
        CompletionDetails(ended.reasoning_tokens),
    )


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
