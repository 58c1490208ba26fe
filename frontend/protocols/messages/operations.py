"""The routes of this protocol, one row each, and the answers that the API's description tells of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from frontend.protocols.messages.messages import (
    CountTokensResource,
    MessagesError,
    MessagesResource,
    TokenCount,
)
from frontend.protocols.messages.requests import MessagesRequest
from frontend.routes import Route, asking


class MessagesUsage(msgspec.Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: Annotated[int, Meta(description="Tokens of the inputs.")]
    output_tokens: Annotated[int, Meta(description="Generated tokens.")]


class MessagesAnswer(msgspec.Struct):
    """A whole message; `content` has blocks of types thinking, text and tool_use."""

    id: Annotated[str, Meta(description="Id of the message.")]
    type: Annotated[Literal["message"], Meta(description="Names the form of this object.")]
    role: Annotated[Literal["assistant"], Meta(description="Who speaks.")]
    content: Annotated[list[dict[str, Any]], Meta(description="Parts of the answer: text, thinking, calls.")]
    model: Annotated[str, Meta(description="Name of the model.")]
    stop_reason: Annotated[
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
        Meta(description="Why the text ended."),
    ]
    stop_sequence: Annotated[str | None, Meta(description="The stop text that ended the answer.")]
    usage: Annotated[MessagesUsage, Meta(description="Counts of tokens.")]
    logprobs: Annotated[
        dict[str, Any] | msgspec.UnsetType, Meta(description="Log probabilities of the tokens.")
    ] = msgspec.UNSET


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504), MessagesError
)
_EXAMPLE = {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}


def _asking(path: str, resource: Any, summary: str, answer: type[msgspec.Struct], *, streams: bool) -> Route:
    return asking(
        path,
        resource,
        summary,
        MessagesRequest,
        answer,
        _EXAMPLE,
        tag="messages",
        errors=_FAULTS,
        error_code_header=False,
        streams=streams,
    )


ROUTES = (
    _asking(
        "/v1/messages",
        MessagesResource,
        "Continue a conversation, in the form of Anthropic.",
        MessagesAnswer,
        streams=True,
    ),
    _asking(
        "/v1/messages/count_tokens",
        CountTokensResource,
        "Count the tokens of the prompt.",
        TokenCount,
        streams=False,
    ),
)
