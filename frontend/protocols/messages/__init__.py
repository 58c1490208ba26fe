"""Messages in the form of Anthropic, and the count of their tokens.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from typing import Any

import msgspec
from falcon.asgi import Request

from frontend.generation.protocol import MessagesError, TextProtocol
from frontend.protocols.messages.messages import (
    PROTOCOL,
    CountTokensResource,
    MessagesAnswer,
    MessagesResource,
    TokenCount,
)
from frontend.protocols.messages.requests import MessagesRequest
from frontend.route_rows import Route, asking

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


class MessagesProtocol(TextProtocol):
    """Routes of messages, and the error form of Anthropic for all that is below them."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES)

    def is_anthropic(self, req: Request | None) -> bool:
        """Always."""
        return True
