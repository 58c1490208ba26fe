"""Messages in the form of OpenAI, in the order of their conversation."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation.conversation import CONTINUING, ROLES, Conversation, calls_of, text_of
from frontend.generation.errors import InvalidField
from frontend.http.fields import one_of
from ipc.settings import Limits

BeginsAnswer = Annotated[
    bool | None, Meta(description="End the conversation with the beginning of an answer; the default.")
]
ContinuesMessage = Annotated[
    bool | None,
    Meta(description="End with the last message, unfinished; excludes a true `add_generation_prompt`."),
]


class ChatMessage(msgspec.Struct):
    """One message; `content` is text, a list of parts, or null beside `tool_calls`."""

    role: Annotated[Annotated[str, one_of(ROLES, required=True)], Meta(description="Who speaks.")]
    content: Annotated[Any, Meta(description="What is said: a text or parts.")] = None
    name: Annotated[str | None, Meta(description="Name of the speaker, or of the called function.")] = None
    tool_calls: Annotated[list[Any] | None, Meta(description="Functions that the model calls.")] = None
    tool_call_id: Annotated[str | None, Meta(description="Id of the call that this message answers.")] = None
    reasoning_content: Annotated[
        str | None, Meta(description="What the model thought before its answer.")
    ] = None
    reasoning: Annotated[str | None, Meta(description="What the model thought before its answer.")] = None


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


def end_variables(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, bool]:
    """Variables of the template for where the prompt ends. Raises `InvalidField` where both fields are true."""
    if continue_final_message and add_generation_prompt:
        raise InvalidField("continue_final_message", "cannot be true beside add_generation_prompt")
    if continue_final_message:
        return dict(CONTINUING)
    return {"add_generation_prompt": False} if add_generation_prompt is False else {}


def _reasoning(message: ChatMessage, where: str) -> str | None:
    """The reasoning under either name; clients that send back what they got may have both."""
    told, alias = message.reasoning_content, message.reasoning
    if told and alias and told != alias:
        raise InvalidField(f"{where}.reasoning", "is a duplicate of reasoning_content: send one of them")
    return told or alias
