"""Messages of Anthropic and their content blocks, as messages for chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation.contents import refuse, text_of, text_of_part
from frontend.generation.conversation import MAX_FUNCTIONS, Conversation
from frontend.generation.errors import InvalidField
from frontend.generation.hosted import Hosted
from frontend.generation.nested import json_text, kind_of
from frontend.generation.pictures import IMAGE, NEW, Album, Content, Part, Standing, content_of_parts
from frontend.http.fields import one_of

_ROLES = ("user", "assistant", "system")
_DROPPED = frozenset(("thinking", "redacted_thinking", "server_tool_use"))
_RESULT = "tool_result"
_CLEARED = "next_user_message"
_CLEAR_AT = ("never", _CLEARED)
TOOL_CHANGES = ("tool_addition", "tool_removal")
"""Blocks of system messages that offer a tool from there on, or withdraw a tool."""


class Message(msgspec.Struct):
    """One message; `content` is text or a list of content blocks."""

    role: Annotated[Annotated[str, one_of(_ROLES, required=True)], Meta(description="Who speaks.")]
    content: Annotated[Any, Meta(description="What is said: a text or parts.")]
    clear_at: Annotated[
        Annotated[str | None, one_of(_CLEAR_AT)],
        Meta(
            description="When the model no longer sees a system message: at the next message of the user, or never."
        ),
    ] = None
    output_config: Annotated[
        dict[str, Any] | None,
        Meta(description="Refused unless empty: `output_config` of the request holds for all messages."),
    ] = None


def add_messages(talk: Conversation, messages: list[Message], hosted: Hosted) -> None:
    """Append what the messages say; `hosted` takes their files. Raises `InvalidField`.

    | block | assistant | user |
    |---|---|---|
    | text | text | text |
    | tool_use | a call | refused |
    | tool_result | refused | a message of the tool, before the text of the user |
    | image | refused | a picture in the order of the blocks |
    | container_upload, document | refused | a file for tools of this server |
    | tool_addition, tool_removal | refused | refused: system messages change the tools (`_functions`) |
    | thinking, redacted_thinking, server_tool_use, *_tool_result | dropped | dropped |
    | anything else | refused | refused |

    Inside of a tool_result an image is a picture, too, and what else is no text becomes its JSON.
    """
    last_turn = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.output_config:
            raise InvalidField(f"{where}.output_config", "not offered: use output_config of the request")
        if message.clear_at not in (None, *_CLEAR_AT):
            raise InvalidField(
                f"{where}.clear_at", f"{message.clear_at[:64]!a} is not one of {', '.join(_CLEAR_AT)}"
            )
        if message.clear_at is not None and message.role != "system":
            raise InvalidField(f"{where}.clear_at", "only system messages are cleared")
        if message.clear_at != _CLEARED or index > last_turn:
            _add_message(talk, message, where, hosted)


def _add_message(talk: Conversation, message: Message, where: str, hosted: Hosted) -> None:
    role, content = message.role, message.content
    if role not in _ROLES:
        raise InvalidField(f"{where}.role", f"{role[:64]!a} is not one of {', '.join(_ROLES)}")
    if content is None:
        raise InvalidField(f"{where}.content", "expected a string or a list of content blocks")
    if role == "system" and isinstance(content, list):
        _add_system(talk, content, where)
        return
    if isinstance(content, str) or role == "system":
        talk.add(role, text_of(content, f"{where}.content"), where)
        return
    blocks = _blocks(content, f"{where}.content")
    if role == "user":
        _add_user(talk, blocks, where, hosted)
    else:
        _add_assistant(talk, blocks, where)


def changes_tools(block: Any) -> bool:
    """Whether a block of a system message changes the tools and says nothing."""
    return isinstance(block, dict) and block.get("type") in TOOL_CHANGES


def _add_system(talk: Conversation, content: list[Any], where: str) -> None:
    texts = [
        text_of_part(part, f"{where}.content[{index}]")
        for index, part in enumerate(content)
        if not changes_tools(part)
    ]
    if texts or not content:
        talk.add("system", " ".join(texts), where)


def _blocks(content: Any, where: str) -> list[tuple[str, dict[str, Any], str]]:
    """(type, block, path) of each block that counts."""
    if not isinstance(content, list):
        raise InvalidField(where, "expected a string or a list of content blocks")
    blocks = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise InvalidField(f"{place}.type", "expected an object with a type")
        if kind in _DROPPED or kind.endswith(f"_{_RESULT}"):
            continue
        blocks.append((kind, block, place))
    return blocks


def _add_user(
    talk: Conversation, blocks: list[tuple[str, dict[str, Any], str]], where: str, hosted: Hosted
) -> None:
    parts: list[Part] = []
    for kind, block, place in blocks:
        if kind == _RESULT:
            call_id = _string(block.get("tool_use_id"), f"{place}.tool_use_id")
            result = _result(block.get("content"), f"{place}.content", talk.album)
            talk.add("tool", result, place, call_id=call_id)
        elif kind == IMAGE:
            parts.append(_picture(block, place, talk.album))
        elif kind == "container_upload" and hosted.offer.takes_files:
            hosted.add_file({"file_id": block.get("file_id")}, place)
        elif kind == "document" and hosted.offer.takes_files:
            _add_document(hosted, block, place)
        else:
            parts.append({"type": "text", "text": _text(kind, block, place)})
    if parts or not any(kind == _RESULT for kind, _, _ in blocks):
        talk.add("user", content_of_parts(parts), where)


def _picture(block: Mapping[str, Any], where: str, album: Album, standing: Standing = NEW) -> Part:
    """An image is base64, a URL, or a stored file. Raises `InvalidField`."""
    source, place = block.get("source"), f"{where}.source"
    kind = kind_of(source, place)
    assert isinstance(source, dict)
    if kind == "base64":
        media_type = _string(source.get("media_type"), f"{place}.media_type")
        return album.from_base64(source.get("data"), media_type, f"{place}.data", standing)
    if kind == "url":
        return album.from_url(source.get("url"), f"{place}.url", standing)
    if kind == "file":
        return album.from_file(source.get("file_id"), f"{place}.file_id", standing)
    raise InvalidField(f"{place}.type", f"{kind[:64]!a} is not one of base64, url, file")


def _add_document(hosted: Hosted, block: dict[str, Any], where: str) -> None:
    """A document is a stored file, base64, text, or a URL. Raises `InvalidField`."""
    source, place = block.get("source"), f"{where}.source"
    kind, title, name_at = kind_of(source, place), block.get("title"), f"{where}.title"
    name = title or "document"
    assert isinstance(source, dict)
    if kind == "file":
        hosted.add_file({"file_id": source.get("file_id")}, place)
    elif kind == "base64":
        hosted.add_data(name, source.get("data"), name_at, f"{place}.data")
    elif kind == "text":
        hosted.add_text(name, _string(source.get("data"), f"{place}.data"), name_at, place)
    elif kind == "url":
        hosted.add_url(source.get("url"), title or None, name_at, f"{place}.url")
    else:
        raise InvalidField(f"{place}.type", f"{kind[:64]!a} is not one of file, base64, text, url")


def _add_assistant(talk: Conversation, blocks: list[tuple[str, dict[str, Any], str]], where: str) -> None:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for kind, block, place in blocks:
        if kind != "tool_use":
            texts.append(_text(kind, block, place))
            continue
        if len(calls) == MAX_FUNCTIONS:
            raise InvalidField(f"{where}.content", f"more than {MAX_FUNCTIONS} tool_use blocks")
        arguments = block.get("input")
        if not isinstance(arguments, dict | None):
            raise InvalidField(f"{place}.input", "expected an object")
        call_id = _string(block.get("id"), f"{place}.id")
        calls.append(talk.call(call_id, block.get("name"), arguments, place, "input"))
    talk.add("assistant", " ".join(texts) if texts or not calls else None, where, calls=calls)


def _text(kind: str, block: dict[str, Any], where: str) -> str:
    """The text of a text block. Raises `InvalidField` for every other kind of block."""
    if kind == "text":
        return _string(block.get("text"), f"{where}.text")
    if kind != IMAGE:
        refuse(kind, where)
    raise InvalidField(f"{where}.type", f"{kind[:64]!a} is not accepted in this message")


def _result(content: Any, where: str, album: Album) -> Content:
    """What a tool gave."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json_text(content, where)
    return content_of_parts(
        [_result_part(part, f"{where}[{index}]", album) for index, part in enumerate(content)]
    )


def _result_part(part: Any, where: str, album: Album) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == IMAGE:
        return _picture(part, where, album, Standing(in_result=True))
    if isinstance(part, str):
        text = part
    elif kind == "text" and isinstance(part.get("text"), str):
        text = part["text"]
    else:
        text = json_text(part, where)
    return {"type": "text", "text": text}


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidField(where, "expected a string")
    return value
