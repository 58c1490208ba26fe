"""Fields of requests that talk to a model: those of chat, Responses and Messages, and those of OpenAI's two only.

The struct of a route adds what only its contract has. A field stands here under the name that all its contracts use.
"""

from __future__ import annotations

from typing import Any

from frontend.generation.hosted import HostedFields


class TalkFields(HostedFields, kw_only=True):
    """The fields of chat, Responses and Messages, on top of those of sampling and of tools that run on the server."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    grammar: Any = None


class ChoiceFields(TalkFields, kw_only=True):
    """The fields of chat and Responses besides."""

    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    parallel_tool_calls: bool | None = None
