"""Messages in the form of OpenAI, in the order of their conversation."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from frontend.generation.conversation import ROLES, Conversation, calls_of, text_of
from frontend.generation.errors import InvalidField
from frontend.http.choices import one_of
from ipc.settings import Limits


class ChatMessage(msgspec.Struct):
    """One message; `content` is text, a list of parts, or null beside `tool_calls`."""

    role: Annotated[str, one_of(ROLES, required=True)]
    content: Any = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


def messages_of(given: list[ChatMessage] | str, limits: Limits) -> list[dict[str, Any]]:
    """The messages as chat templates read them; a bare text is what a user says. Raises `InvalidField`."""
    talk = Conversation(limits)
    if isinstance(given, str):
        talk.add("user", given, "messages")
        return talk.finished()
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        talk.add(
            message.role,
            text_of(message.content, f"{where}.content"),
            where,
            calls=calls_of(talk, message.tool_calls, f"{where}.tool_calls"),
            call_id=message.tool_call_id,
            name=message.name,
            reasoning=_reasoning(message, where),
        )
    return talk.finished()


def _reasoning(message: ChatMessage, where: str) -> str | None:
    """The reasoning under either name; clients that send back what they got may have both."""
    told, alias = message.reasoning_content, message.reasoning
    if told and alias and told != alias:
        raise InvalidField(f"{where}.reasoning", "is a duplicate of reasoning_content: send one of them")
    return told or alias
