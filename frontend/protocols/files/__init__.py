"""Files that clients upload and agents make, in the forms of OpenAI and Anthropic, and files of containers.

May be imported by `frontend.protocols.registry`. Imports no other protocol.
"""

from __future__ import annotations

from functools import partial

from falcon.asgi import Request

from frontend.generation.protocol import BOTH_FORMS, TextProtocol, stored
from frontend.generation.requests import is_anthropic
from frontend.protocols.files.resources import (
    ContainerContentResource,
    ContainerFileResource,
    ContainerFilesResource,
    ContainersResource,
    ContentResource,
    FileResource,
    FilesResource,
)
from frontend.protocols.files.schemas import (
    MOST_LISTED,
    ContainerFile,
    ContainerFileList,
    DeletedContainerFile,
    DeletedFile,
    FileList,
    FileMetadata,
    FileUpload,
    MessagesDeletedFile,
    MessagesFile,
    MessagesFileList,
)
from frontend.route_rows import Parameter, Route

PROTOCOL = "files"
_ROOT, _CONTAINERS = "/v1/files", "/v1/containers"
_ONE, _OF_CONTAINER = f"{_ROOT}/{{file_id}}", f"{_CONTAINERS}/{{container_id}}/files"
_LIMIT = Parameter(
    "limit", "query", "Most files of a page.", {"type": "integer", "minimum": 1, "maximum": MOST_LISTED}
)
_AFTER = Parameter("after", "query", "Id of the last file of the page before.")
_ORDER = Parameter("order", "query", "Oldest or newest first.", {"type": "string", "enum": ["asc", "desc"]})
_LISTING = (
    _AFTER,
    _LIMIT,
    _ORDER,
    Parameter("purpose", "query", "The purpose that files must have."),
    Parameter("page", "query", "`after`, by the name that Anthropic gives it."),
    Parameter("ids", "query", "With an Anthropic header: ids of the files that are asked for."),
)
_RANGE = Parameter("Range", "header", "One range of bytes, as in `bytes=0-99`.")
_FORM = "multipart/form-data"
_OCTETS = "application/octet-stream"
_route = partial(stored, tag="files")

ROUTES = (
    _route(
        "post",
        _ROOT,
        FilesResource,
        "Store a file of the client.",
        (FileMetadata, MessagesFile),
        statuses=(408, 413, 415, 504, 507),
        faults=BOTH_FORMS,
        body=FileUpload,
        request_media=(_FORM,),
    ),
    _route(
        "get",
        _ROOT,
        FilesResource,
        "The files of the caller, a page at a time.",
        (FileList, MessagesFileList),
        faults=BOTH_FORMS,
        parameters=_LISTING,
    ),
    _route(
        "get",
        _ONE,
        FileResource,
        "A file, without its bytes.",
        (FileMetadata, MessagesFile),
        faults=BOTH_FORMS,
    ),
    _route(
        "delete", _ONE, FileResource, "Delete a file.", (DeletedFile, MessagesDeletedFile), faults=BOTH_FORMS
    ),
    _route(
        "get",
        f"{_ONE}/content",
        ContentResource,
        "The bytes of a file.",
        None,
        statuses=(410, 416),
        faults=BOTH_FORMS,
        media=(_OCTETS,),
        also={206: "A part of the bytes."},
        parameters=(_RANGE,),
    ),
    _route(
        "get",
        _OF_CONTAINER,
        ContainerFilesResource,
        "The files that one response made, a page at a time.",
        ContainerFileList,
        faults=BOTH_FORMS,
        parameters=(_AFTER, _LIMIT, _ORDER),
    ),
    _route(
        "get",
        f"{_OF_CONTAINER}/{{file_id}}",
        ContainerFileResource,
        "A file by any container, without its bytes.",
        ContainerFile,
        faults=BOTH_FORMS,
    ),
    _route(
        "delete",
        f"{_OF_CONTAINER}/{{file_id}}",
        ContainerFileResource,
        "Delete a file by any container.",
        DeletedContainerFile,
        faults=BOTH_FORMS,
    ),
    _route(
        "get",
        f"{_OF_CONTAINER}/{{file_id}}/content",
        ContainerContentResource,
        "The bytes of a file by any container.",
        None,
        statuses=(410, 416),
        faults=BOTH_FORMS,
        media=(_OCTETS,),
        also={206: "A part of the bytes."},
        parameters=(_RANGE,),
    ),
    *(Route("post", path, ContainersResource) for path in (_CONTAINERS, f"{_CONTAINERS}/{{container_id}}")),
)


class FilesProtocol(TextProtocol):
    """Routes of files and containers. Errors have the form of Anthropic where a header of Anthropic is present."""

    def __init__(self) -> None:
        super().__init__(PROTOCOL, ROUTES)

    def is_anthropic(self, req: Request | None) -> bool:
        """Whether a header of Anthropic is present."""
        return is_anthropic(req)
