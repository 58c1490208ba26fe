"""The messages of a conversation as chat templates read them, made from what a protocol has parsed.

1. A protocol gives each message to a `Conversation`: role, text, calls of the assistant, answers of tools.
2. Arguments of calls are JSON text on the wire and objects in templates. Their integers are exact, however long.
3. Texts may hold anything but NUL. The number of messages and their bytes in all are bounded by the limits of texts,
   and so are the arguments of calls.
4. Pictures, sound, video and files are refused: the models that generate take text only.

`messages_of` reads messages in the form of OpenAI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation.errors import InvalidField
from frontend.generation.nested import arguments_of, values_of
from frontend.generation.tools import MAX_FUNCTIONS
from frontend.http.fields import one_of
from ipc.settings import Limits

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that hold text, and the field with the text."""
MEDIA_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}
CONTINUING: Mapping[str, bool] = {"add_generation_prompt": False, "continue_final_message": True}
"""Variables of a template whose last message the answer continues."""
_SCHEMES = ("data:", "http://", "https://")
BeginsAnswer = Annotated[
    bool | None, Meta(description="End the conversation with the beginning of an answer; the default.")
]
ContinuesMessage = Annotated[
    bool | None,
    Meta(description="End with the last message, unfinished; excludes a true `add_generation_prompt`."),
]


class Conversation:
    """Messages in the form of chat templates, in their order. `field` is the path of the list in the request."""

    def __init__(self, limits: Limits, field: str = "messages") -> None:
        self.messages: list[dict[str, Any]] = []
        self.field = field
        self._limits = limits
        self._nbytes = 0
        self._called: dict[str, str] = {}

    def add(
        self,
        role: str,
        text: str | None,
        where: str,
        *,
        calls: Sequence[dict[str, Any]] = (),
        call_id: str | None = None,
        name: str | None = None,
        reasoning: str | None = None,
    ) -> None:
        """Append a message. Raises `InvalidField` for an unknown role, and for too much of anything."""
        if role not in ROLES:
            raise InvalidField(f"{where}.role", f"{role[:64]!a} is not one of {', '.join(ROLES)}")
        if text is None and not calls:
            raise InvalidField(f"{where}.content", "may be absent only together with tool_calls")
        if len(self.messages) >= self._limits.max_items:
            raise InvalidField(self.field, f"more than {self._limits.max_items} messages (limits.max_items)")
        # Templates know the role of a developer by its older name.
        message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
        for key, value in (("tool_call_id", call_id), ("name", name), ("reasoning_content", reasoning)):
            if value is not None:
                message[key] = self.checked(value, f"{where}.{key}")
        if role == "tool" and name is None and call_id in self._called:
            # Clients name the call, some templates want the name of the function.
            message["name"] = self._called[call_id]
        if text is not None:
            self.checked(text, f"{where}.content")
        if calls:
            message["tool_calls"] = list(calls)
        self.messages.append(message)

    def call(
        self, call_id: Any, name: Any, arguments: Any, where: str, field: str = "arguments"
    ) -> dict[str, Any]:
        """One call of the assistant in the form of templates; `arguments` is JSON text or an object.

        `field` is the name of the arguments in the request. Raises `InvalidField`.
        """
        if not isinstance(name, str) or not name:
            raise InvalidField(f"{where}.name", "expected the name of a function")
        if not isinstance(call_id, str | None):
            raise InvalidField(f"{where}.id", "expected a string")
        place = f"{where}.{field}"
        told, text = arguments_of(_arguments(arguments, place), place)
        self.checked(text, place)
        function = {"name": self.checked(name, f"{where}.name"), "arguments": told}
        call: dict[str, Any] = {"type": "function", "function": function}
        if call_id is None:
            return call
        self._called[call_id] = name
        return {"id": self.checked(call_id, f"{where}.id"), **call}

    def checked(self, text: str, where: str) -> str:
        """`text`, which counts for the limit of the conversation. Raises `InvalidField` for NUL or too much text."""
        if "\0" in text:
            raise InvalidField(where, "holds a NUL character")
        self._nbytes += len(text.encode())
        limit = self._limits.max_text_bytes
        if self._nbytes > limit:
            raise InvalidField(where, f"more than {limit} bytes of text up to here (limits.max_text_bytes)")
        return text

    def finished(self) -> list[dict[str, Any]]:
        """The messages. Raises `InvalidField` if there is none."""
        if not self.messages:
            raise InvalidField(self.field, "may not be empty")
        return self.messages


def is_continued(message: Mapping[str, Any]) -> bool:
    """Whether an answer can go on with this message: the assistant says something there, and calls nothing."""
    return (
        message["role"] == "assistant" and message.get("content") is not None and "tool_calls" not in message
    )


def text_of(content: Any, where: str) -> str | None:
    """The text of `content`: a string, or parts of text, which a space joins. Raises `InvalidField`."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(where, "expected a string or a list of parts")
    return " ".join(text_of_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def text_of_part(part: Any, where: str) -> str:
    """The text of one part. Raises `InvalidField` for a part that is not text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidField(where, "expected an object with a type")
    kind = part.get("type")
    kind = "text" if kind is None else kind
    if not isinstance(kind, str):
        raise InvalidField(f"{where}.type", "expected a string")
    if kind in TEXT_PARTS:
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise InvalidField(f"{where}.{TEXT_PARTS[kind]}", "expected a string")
        return text
    refuse_media(kind, part, where)
    raise InvalidField(f"{where}.type", f"{kind[:64]!a} is no known kind of content")


def refuse_media(kind: str, part: Mapping[str, Any], where: str) -> None:
    """Raise the `InvalidField` of a part that is not text, if `kind` is one of `MEDIA_PARTS`."""
    if kind == "file_url":
        raise InvalidField(f"{where}.type", "'file_url' is not accepted here")
    if kind not in MEDIA_PARTS:
        return
    inner = part.get(kind)
    url = inner.get("url") if isinstance(inner, dict) else inner
    if kind.endswith("_url") and not (isinstance(url, str) and url.lower().startswith(_SCHEMES)):
        raise InvalidField(f"{where}.{kind}.url", "expected a URL with the scheme data, http or https")
    raise InvalidField(f"{where}.type", f"{kind!a}: the model takes text only, no {MEDIA_PARTS[kind]}")


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """The arguments of a call as an object; no text at all means no arguments. Raises `InvalidField`."""
    if isinstance(given, str):
        given = values_of(given, where) if given.strip() else {}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidField(where, "expected an object, or its JSON text")
    return given


def calls_of(conversation: Conversation, given: Any, where: str) -> list[dict[str, Any]]:
    """`tool_calls` of a message of the assistant in the form of OpenAI. Raises `InvalidField`."""
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MAX_FUNCTIONS:
        raise InvalidField(where, f"expected a list of at most {MAX_FUNCTIONS} calls")
    calls = []
    for index, each in enumerate(given):
        place = f"{where}[{index}]"
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict):
            raise InvalidField(f"{place}.function", "expected an object")
        arguments, parameters = function.get("arguments"), function.get("parameters")
        if arguments is not None and parameters is not None:
            raise InvalidField(
                f"{place}.function.parameters", "is a duplicate of arguments: send one of them"
            )
        arguments = parameters if arguments is None else arguments
        calls.append(conversation.call(each.get("id"), function.get("name"), arguments, f"{place}.function"))
    return calls


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
