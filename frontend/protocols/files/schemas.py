"""Bodies of the routes of files: an upload, and metadata of files in the forms of OpenAI, Anthropic and containers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.http.fields import instant
from frontend.state.files import File

MOST_LISTED = 10_000
"""Files of a page."""
WORK_DIRECTORY = "/mnt/data"
"""Where files of containers lie, by the name that clients of OpenAI know."""
_Name = Annotated[str, Meta(description="The name that the file was given.")]
_Type = Annotated[str, Meta(description="Media type of the bytes.")]
_Size = Annotated[int, Meta(description="Number of bytes.")]
_Created = Annotated[int, Meta(description="When the file was stored, in seconds since 1970.")]
_Id = Annotated[str, Meta(description="Id of the file.")]
_First = Annotated[str | None, Meta(description="Id of the first of these.")]
_Last = Annotated[str | None, Meta(description="Id of the last of these.")]
_More = Annotated[bool, Meta(description="Whether there are more behind the last one.")]
_Deleted = Annotated[Literal[True], Meta(description="Whether the file is gone.")]


class FileUpload(msgspec.Struct):
    """The parts of an upload, in any order."""

    file: Annotated[
        str,
        Meta(description="The bytes, with a file name.", extra_json_schema={"format": "binary"}),
    ]
    purpose: Annotated[
        str | UnsetType,
        Meta(description="What the file is for. With a header of Anthropic the default is `user_data`."),
    ] = UNSET
    anchor: Annotated[Literal["created_at"] | UnsetType, Meta(description="From when `seconds` count.")] = (
        msgspec.field(name="expires_after[anchor]", default=UNSET)
    )
    seconds: Annotated[
        Annotated[int, Meta(ge=1)] | UnsetType,
        Meta(description="Seconds after which the file expires, where that is sooner than by itself."),
    ] = msgspec.field(name="expires_after[seconds]", default=UNSET)


class FileSource(msgspec.Struct):
    """Where a file comes from."""

    tool: Annotated[str, Meta(description="The tool that made the file, or `user_upload`.")]
    round: Annotated[int, Meta(description="Round of the run, from 0.")]
    turn: Annotated[int, Meta(description="Turn of the user, from 0.")]


class FileMetadata(msgspec.Struct, omit_defaults=True):
    """A file without its bytes."""

    id: _Id
    object: Annotated[Literal["file"], Meta(description="Names the form of this object.")]
    bytes: _Size
    created_at: _Created
    expires_at: Annotated[int, Meta(description="When the file expires, in seconds since 1970.")]
    filename: _Name
    purpose: Annotated[str, Meta(description="What the file is for.")]
    mime_type: _Type
    status: Annotated[Literal["processed", "error"], Meta(description="`error`: the file could not be made.")]
    source: Annotated[FileSource, Meta(description="Where the file comes from.")]
    format: Annotated[str | UnsetType, Meta(description="Format, where the name tells one.")] = UNSET
    truncated: Annotated[bool | UnsetType, Meta(description="Whether the bytes are not kept.")] = UNSET


class FileList(msgspec.Struct):
    """A page of files."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[FileMetadata], Meta(description="The list.")]
    has_more: _More
    first_id: _First
    last_id: _Last


class DeletedFile(msgspec.Struct):
    """A file that is not stored any more."""

    id: _Id
    object: Annotated[Literal["file"], Meta(description="Names the form of this object.")]
    deleted: _Deleted


class MessagesFile(msgspec.Struct):
    """A file without its bytes, in the form of Anthropic."""

    id: _Id
    type: Annotated[Literal["file"], Meta(description="Names the form of this object.")]
    filename: _Name
    mime_type: _Type
    size_bytes: _Size
    created_at: Annotated[str, Meta(description="When the file was stored, in RFC 3339.")]
    downloadable: Annotated[bool, Meta(description="Whether the bytes can be asked for.")]


class MessagesFileList(msgspec.Struct):
    """A page of files, in the form of Anthropic."""

    data: Annotated[list[MessagesFile], Meta(description="The list.")]
    has_more: _More
    first_id: _First
    last_id: _Last
    next_page: Annotated[str | None, Meta(description="`page` of the next request; null at the end.")]


class MessagesDeletedFile(msgspec.Struct):
    """A file that is not stored any more, in the form of Anthropic."""

    id: _Id
    type: Annotated[Literal["file_deleted"], Meta(description="Names the form of this object.")]


class ContainerFile(msgspec.Struct, omit_defaults=True):
    """A file of a container, without its bytes."""

    id: _Id
    object: Annotated[Literal["container.file"], Meta(description="Names the form of this object.")]
    container_id: Annotated[str, Meta(description="The container that the request names.")]
    path: Annotated[str, Meta(description="Where the file lies in the container.")]
    bytes: _Size
    created_at: _Created
    filename: _Name
    mime_type: _Type
    source: Annotated[FileSource, Meta(description="Where the file comes from.")]
    format: Annotated[str | UnsetType, Meta(description="Format, where the name tells one.")] = UNSET


class ContainerFileList(msgspec.Struct):
    """A page of files of a container."""

    object: Annotated[Literal["list"], Meta(description="Names the form of this object.")]
    data: Annotated[list[ContainerFile], Meta(description="The list.")]
    has_more: _More
    first_id: _First
    last_id: _Last


class DeletedContainerFile(msgspec.Struct):
    """A file of a container that is not stored any more."""

    id: _Id
    object: Annotated[Literal["container.file.deleted"], Meta(description="Names the form of this object.")]
    deleted: _Deleted


def metadata_of(file: File) -> FileMetadata:
    """A file in the form of OpenAI."""
    is_elided = not (file.content or file.placeholder)
    return FileMetadata(
        file.id,
        "file",
        file.nbytes,
        int(file.created),
        int(file.expires),
        file.name,
        file.purpose,
        file.mime_type,
        "error" if file.placeholder else "processed",
        FileSource(*file.origin),
        file.format or UNSET,
        is_elided or UNSET,
    )


def messages_file_of(file: File) -> MessagesFile:
    """A file in the form of Anthropic."""
    created = instant(file.created)
    return MessagesFile(file.id, "file", file.name, file.mime_type, file.nbytes, created, bool(file.content))


def container_file_of(file: File, container: str) -> ContainerFile:
    """A file as one of the container that the request names."""
    return ContainerFile(
        file.id,
        "container.file",
        container,
        f"{WORK_DIRECTORY}/{file.name}",
        file.nbytes,
        int(file.created),
        file.name,
        file.mime_type,
        FileSource(*file.origin),
        file.format or UNSET,
    )
