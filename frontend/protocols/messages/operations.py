"""The routes of this protocol for the API's description, one row each."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from frontend.openapi.operation import Operation, asking
from frontend.protocols.messages.message_requests import MessagesRequest


class MessagesErrorInfo(msgspec.Struct):
    """What went wrong."""

    type: str
    message: str


class MessagesError(msgspec.Struct):
    """An error in the form of Anthropic."""

    type: Literal["error"]
    error: MessagesErrorInfo


class MessagesUsage(msgspec.Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    output_tokens: int


class MessagesAnswer(msgspec.Struct):
    """A whole message; `content` has blocks of types thinking, text and tool_use."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    model: str
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    logprobs: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


_FAULTS: dict[int, type[msgspec.Struct] | None] = dict.fromkeys(
    (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504), MessagesError
)
_EXAMPLE = {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}


def _asking(path: str, summary: str, answer: type[msgspec.Struct], *, streams: bool) -> Operation:
    return asking(
        path,
        summary,
        MessagesRequest,
        answer,
        _EXAMPLE,
        tag="messages",
        errors=_FAULTS,
        error_code_header=False,
        streams=streams,
    )


OPERATIONS = (
    _asking(
        "/v1/messages", "Continue a conversation, in the form of Anthropic.", MessagesAnswer, streams=True
    ),
    _asking("/v1/messages/count_tokens", "Count the tokens of the prompt.", TokenCount, streams=False),
)
