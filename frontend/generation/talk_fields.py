"""Fields of requests that talk to a model: those of chat, Responses and Messages, and those of OpenAI's two only.

The struct of a route adds what only its contract has. A field stands here under the name that all its contracts use.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from frontend.generation.hosted import HostedFields


class TalkFields(HostedFields, kw_only=True):
    """The fields of chat, Responses and Messages, on top of those of sampling and of tools that run on the server."""

    model: Annotated[str | None, Meta(description="Name of the model.")] = None
    max_tokens: Annotated[int | None, Meta(description="Most tokens to generate, at least 1.")] = None
    stream: Annotated[bool | None, Meta(description="Answer with events as the text comes.")] = None
    tools: Annotated[
        list[Any] | None, Meta(description="Functions that the model may call, at most 128.")
    ] = None
    tool_choice: Annotated[Any, Meta(description="Whether the model calls functions, and which.")] = None
    logprobs: Annotated[bool | None, Meta(description="Log probabilities of the tokens.")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of alternatives beside each token, 0 to 20.")
    ] = None
    response_format: Annotated[
        Any, Meta(description="The form of the answer: text, any JSON, or JSON of a schema.")
    ] = None
    grammar: Annotated[
        Any, Meta(description="A grammar that the answer keeps to; not beside a form of the answer.")
    ] = None


class ChoiceFields(TalkFields, kw_only=True):
    """The fields of chat and Responses besides."""

    max_completion_tokens: Annotated[
        int | None, Meta(description="Most tokens to generate, at least 1; not beside `max_tokens`.")
    ] = None
    n: Annotated[int | None, Meta(description="Number of choices, 1 to 128.")] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(description="Texts that end the answer and are not part of the answer, at most 64."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether the model may call several functions at once.")
    ] = None
