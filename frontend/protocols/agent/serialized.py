"""A session as JSON, in the form of mistral.rs: written, and read from a client that imports a session.

1. Each value of a message is tagged: `{"Left": text}` or `{"Right": list}`. Arguments of tool calls are objects.
2. An import may have that form or the plain form of OpenAI, mixed at will. Messages are checked as those of a request.
3. Files come with their bodies while these have at most `MAX_BODIES_NBYTES` together; a further file has none.
4. `images` are the pictures of all messages as base64, in the order of the parts `{"type": "image"}`. An export has
   the files as they were sent, an import may have any format that conversations take, and data URLs in messages.
5. Conversations of this server have no videos. An import with any is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frontend.generation.conversation import ChatMessage, messages_of
from frontend.generation.errors import InvalidField
from frontend.generation.pictures import IMAGE, check_picture, pictures_of, rows_of
from frontend.state.files import AGENT_OUTPUT, USER_DATA, Origin, Placeholder
from ipc.decoding import learnt
from ipc.settings import Limits, State

MAX_BODIES_NBYTES = 32 << 20
"""Bytes of all bodies in an export, so that an export can be imported again."""
_TAGS = ("Left", "Right")
_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MOST_TEXT = 4096


class SerializedSession(msgspec.Struct):
    """A session. Only `messages` is required in an import."""

    messages: Annotated[
        list[dict[str, Any]], Meta(description="The conversation, with the calls of tools and their results.")
    ]
    images: Annotated[list[str], Meta(description="The pictures of the messages as base64, in order.")] = []
    videos: Annotated[
        list[dict[str, Any]], Meta(description="Always empty: no model here takes videos.")
    ] = []
    files: Annotated[list[dict[str, Any]], Meta(description="The files, with their bodies.")] = []


class _Source(msgspec.Struct):
    """Where an imported file came from."""

    tool: str = "user_upload"
    round: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    turn: Annotated[int, Meta(ge=0, le=1 << 31)] = 0


class _FileObject(msgspec.Struct):
    """A file of an import."""

    id: str
    name: str
    purpose: str = USER_DATA
    format: str | None = None
    bytes: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    source: _Source = msgspec.field(default_factory=_Source)
    text: str | None = None
    data_base64: str | None = None
    code: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A checked file of an import; without `content` it is a placeholder or has lost its bytes."""

    id: str
    name: str
    purpose: str
    format: str | None
    nbytes: int
    origin: Origin
    content: bytes | None
    placeholder: Placeholder | None


def exported(rows: Sequence[dict[str, Any]], files: list[dict[str, Any]]) -> SerializedSession:
    """A session by the rows of its messages (`frontend.generation.pictures.rows_of`), and its files."""
    images, messages = list[str](), []
    for row in rows:
        if isinstance(content := row.get("content"), list):
            images += [part["data"] for part in content if part["type"] == IMAGE]
            bare = [{"type": IMAGE} if part["type"] == IMAGE else part for part in content]
            row = {**row, "content": bare}
        messages.append({key: _tagged(value) for key, value in row.items()})
    return SerializedSession(messages, images=images, files=files)


def _tagged(value: Any) -> Any:
    if isinstance(value, str):
        return {"Left": value}
    return {"Right": value} if isinstance(value, list) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        [(tag, inner)] = value.items()
        return inner if tag in _TAGS else value
    return value


def messages_in(session: SerializedSession, limits: Limits, bounds: State) -> list[dict[str, Any]]:
    """The messages of an import as rows of a session. Raises `InvalidField`."""
    if session.videos:
        raise InvalidField("videos", f"{len(session.videos)} given, no model here takes videos")
    given_messages, images = [], iter(session.images)
    for index, message in enumerate(session.messages):
        plain = {key: _untagged(value) for key, value in message.items()}
        if isinstance(content := plain.get("content"), list):
            plain["content"] = [_with_image(part, images) for part in content]
        try:
            given_messages.append(msgspec.convert(plain, learnt(ChatMessage)))
        except msgspec.ValidationError as error:
            raise InvalidField(f"messages[{index}]", str(error)[:200]) from None
    if (left := sum(1 for _ in images)) > 0:
        raise InvalidField("images", f"{left} more than the messages show")
    if not given_messages:
        return []
    limits = msgspec.structs.replace(limits, max_text_bytes=bounds.max_file_bytes)
    messages = messages_of(given_messages, limits)
    for picture in pictures_of(messages):
        if not picture.data:
            raise InvalidField(picture.where, "an import has its pictures in images, or as data URLs")
        check_picture(picture, limits)
    return rows_of(messages)


def _with_image(part: Any, images: Iterator[str]) -> Any:
    """A part of a content; the next of the images where the part shows one. Raises `InvalidField`."""
    if part != {"type": IMAGE}:
        return part
    image = next(images, None)
    if image is None:
        raise InvalidField("images", "fewer than the messages show")
    return {"type": "image_url", "image_url": f"data:;base64,{image}"}


def files_in(session: SerializedSession, bounds: State) -> list[ImportedFile]:
    """The files of an import. Raises `InvalidField`."""
    if len(session.files) > bounds.max_files:
        raise InvalidField(
            "files", f"{len(session.files)} files, the limit is {bounds.max_files} (state.max_files)"
        )
    files = [_file_in(given, f"files[{index}]", bounds) for index, given in enumerate(session.files)]
    if len({file.id for file in files}) < len(files):
        raise InvalidField("files", "two files have the same id")
    return files


def _file_in(given: dict[str, Any], where: str, bounds: State) -> ImportedFile:
    try:
        file = msgspec.convert(given, learnt(_FileObject))
    except msgspec.ValidationError as error:
        raise InvalidField(where, str(error)[:200]) from None
    if not _ID.fullmatch(file.id):
        raise InvalidField(f"{where}.id", "expected 1 to 128 letters, digits, '_', '-' or '.'")
    _check_texts(where, (file.name, file.purpose, file.format or "", file.source.tool, file.message or ""))
    content = _content_of(file, where)
    if content is not None and len(content) > bounds.max_file_bytes:
        raise InvalidField(
            where, f"{len(content)} bytes, the limit is {bounds.max_file_bytes} (state.max_file_bytes)"
        )
    placeholder = Placeholder(file.code[:64], file.message or "") if file.code else None
    return ImportedFile(
        file.id,
        file.name,
        file.purpose if file.purpose in (USER_DATA, AGENT_OUTPUT) else USER_DATA,
        file.format,
        0 if placeholder else file.bytes,
        Origin(file.source.tool, file.source.round, file.source.turn),
        None if placeholder else content,
        placeholder,
    )


def _check_texts(where: str, texts: Sequence[str]) -> None:
    for text in texts:
        if len(text) > _MOST_TEXT:
            raise InvalidField(where, f"a text of {len(text)} characters, the limit is {_MOST_TEXT}")


def _content_of(file: _FileObject, where: str) -> bytes | None:
    if file.text is not None and file.data_base64 is not None:
        raise InvalidField(where, "has both text and data_base64")
    if file.text is not None:
        return file.text.encode()
    if file.data_base64 is None:
        return None
    try:
        return base64.b64decode(file.data_base64, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(f"{where}.data_base64", "is no base64") from None
