"""The resources of files and of containers' files. Each caller sees the caller's own files only.

1. An upload is taken apart while it arrives, and its bytes go to a content file in pieces. No upload is held whole.
2. A container is a name that responses give to the files of one answer. A file is found under any container.
3. Bytes leave in pieces that threads read. Types that a browser would run (`ACTIVE`) leave as attachments, and no
   browser may guess a type.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import falcon
from falcon.asgi import Request, Response

from frontend.generation.errors import InvalidField, MalformedBody
from frontend.generation.multipart import FRAMING_NBYTES, Fields, parts_of
from frontend.generation.requests import ORDERS, is_anthropic, number, owner_of, word
from frontend.protocols.files.schemas import (
    MOST_LISTED,
    ContainerFileList,
    DeletedContainerFile,
    DeletedFile,
    FileList,
    FileUpload,
    MessagesDeletedFile,
    MessagesFileList,
    container_file_of,
    messages_file_of,
    metadata_of,
)
from frontend.sending import answer_json
from frontend.services import Services
from frontend.state.content import PIECE_NBYTES, Draft, StoredBytes
from frontend.state.files import USER_DATA, File, Origin
from ipc.errors import BodyTooLarge, FileNotFound, InvalidInput, Unsupported

ACTIVE = ("html", "svg", "xml", "javascript")
"""Words in media types whose bytes a browser would run."""
_MOST_PURPOSE = 64
_UPLOAD = Origin("user_upload")
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = frozenset(FileUpload.__struct_encode_fields__) - {"file"}
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_MOST_IDS = 100


class _Resource:
    """A resource over the files of a server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def _file(self, req: Request, file_id: str) -> File:
        return await self._services.state.files.get(owner_of(req), file_id)

    async def _delete(self, req: Request, file_id: str) -> None:
        await self._services.state.files.delete(owner_of(req), file_id)

    async def _page(self, req: Request, **chosen: str) -> tuple[list[File], bool]:
        return await self._services.state.files.page(
            owner_of(req),
            after=req.get_param("after") or req.get_param("page") or "",
            limit=number(req, "limit", 1, MOST_LISTED, MOST_LISTED),
            order=word(req, "order", ORDERS, "asc"),
            **chosen,
        )

    async def _send(self, req: Request, resp: Response, file_id: str) -> None:
        file = await self._file(req, file_id)
        descriptor = await self._services.state.files.open(file)
        try:
            span = _span(req, file.nbytes)
            _describe(resp, file, span)
            if req.method != "HEAD":
                resp.stream = StoredBytes(descriptor, span)
                descriptor = -1
        finally:
            if descriptor >= 0:
                os.close(descriptor)


class FilesResource(_Resource):
    """POST: store a file. GET: the files of the caller."""

    async def on_post(self, req: Request, resp: Response) -> None:
        """Metadata of the new file."""
        files, fields, limit = (
            self._services.state.files,
            Fields(),
            self._services.settings.state.max_file_bytes,
        )
        deadline_ns = req.context.penstock.deadline_ns
        async with files.draft() as draft:
            gathered = _Gathered(draft, limit)
            name: str | None = None
            async for part, data in parts_of(req, self._services.bodies, deadline_ns, limit + FRAMING_NBYTES):
                if part.name != "file":
                    if part.name in _FIELDS:
                        fields.take(part, data)
                    continue
                if not data and name is not None:
                    raise MalformedBody("file: given twice")
                if name is None and not part.filename:
                    raise MalformedBody("file: the part has no file name")
                name = part.filename
                await gathered.take(data)
            if name is None:
                raise MalformedBody("file: is required")
            await gathered.flush()
            file = await files.add(
                owner_of(req),
                draft,
                name=name,
                purpose=_purpose(fields, is_anthropic(req)),
                origin=_UPLOAD,
                expires_after_s=_expiry(fields),
            )
        answer_json(resp, messages_file_of(file) if is_anthropic(req) else metadata_of(file))

    async def on_get(self, req: Request, resp: Response) -> None:
        """A page of files, oldest first unless `order` is `desc`."""
        answer: Any
        if is_anthropic(req):
            files, has_more = await self._chosen(req)
            ends = _ends(files)
            answer = MessagesFileList(
                [messages_file_of(file) for file in files], has_more, *ends, ends[1] if has_more else None
            )
        else:
            files, has_more = await self._page(req, purpose=req.get_param("purpose") or "")
            answer = FileList("list", [metadata_of(file) for file in files], has_more, *_ends(files))
        answer_json(resp, answer)

    async def _chosen(self, req: Request) -> tuple[list[File], bool]:
        """The files that `ids` names, else a page."""
        given = req.get_param_as_list("ids") or req.get_param_as_list("ids[]") or []
        ids = [file_id for one in given for file_id in one.split(",")]
        if not ids:
            return await self._page(req)
        if len(ids) > _MOST_IDS:
            raise InvalidField("ids", f"{len(ids)} ids, the limit is {_MOST_IDS}")
        files = []
        for file_id in ids:
            with suppress(FileNotFound):
                files.append(await self._file(req, file_id))
        return files, False


class FileResource(_Resource):
    """GET and DELETE of one file."""

    async def on_get(self, req: Request, resp: Response, file_id: str) -> None:
        """Metadata."""
        file = await self._file(req, file_id)
        answer_json(resp, messages_file_of(file) if is_anthropic(req) else metadata_of(file))

    async def on_delete(self, req: Request, resp: Response, file_id: str) -> None:
        """Delete the file."""
        await self._delete(req, file_id)
        if is_anthropic(req):
            answer_json(resp, MessagesDeletedFile(file_id, "file_deleted"))
        else:
            answer_json(resp, DeletedFile(file_id, "file", True))


class ContentResource(_Resource):
    """GET and HEAD of the bytes of a file."""

    async def on_get(self, req: Request, resp: Response, file_id: str) -> None:
        """All bytes, or one range of them."""
        await self._send(req, resp, file_id)

    on_head = on_get


class ContainerFilesResource(_Resource):
    """GET: the files of one container."""

    async def on_get(self, req: Request, resp: Response, container_id: str) -> None:
        """A page of files."""
        files, has_more = await self._page(req, container=container_id)
        shown = [container_file_of(file, container_id) for file in files]
        answer_json(resp, ContainerFileList("list", shown, has_more, *_ends(files)))

    async def on_post(self, req: Request, resp: Response, container_id: str) -> None:
        """Raises `Unsupported`."""
        raise _belongs_to_responses()


class ContainerFileResource(_Resource):
    """GET and DELETE of a file by any container."""

    async def on_get(self, req: Request, resp: Response, container_id: str, file_id: str) -> None:
        """Metadata."""
        answer_json(resp, container_file_of(await self._file(req, file_id), container_id))

    async def on_delete(self, req: Request, resp: Response, container_id: str, file_id: str) -> None:
        """Delete the file."""
        await self._delete(req, file_id)
        answer_json(resp, DeletedContainerFile(file_id, "container.file.deleted", True))


class ContainerContentResource(_Resource):
    """GET and HEAD of the bytes of a file by any container."""

    async def on_get(self, req: Request, resp: Response, container_id: str, file_id: str) -> None:
        """All bytes, or one range of them."""
        await self._send(req, resp, file_id)

    on_head = on_get


class ContainersResource:
    """The life of containers, which no client decides."""

    def __init__(self, services: Services) -> None:
        """Takes what all resources take."""

    async def on_post(self, req: Request, resp: Response, container_id: str = "") -> None:
        """Raises `Unsupported`."""
        raise _belongs_to_responses()

    on_get = on_delete = on_post


def _belongs_to_responses() -> Unsupported:
    return Unsupported(
        "containers belong to responses: the server makes one for each response, and clients can only read the files "
        "at /v1/containers/{container_id}/files"
    )


class _Gathered:
    """The bytes of an upload on their way into a draft, in pieces that are worth a thread."""

    def __init__(self, draft: Draft, limit: int) -> None:
        self._draft, self._limit = draft, limit
        self._pieces: list[bytes] = []
        self._nbytes = 0

    async def take(self, data: bytes) -> None:
        """Add bytes. Raises `BodyTooLarge`."""
        self._pieces.append(data)
        self._nbytes += len(data)
        if self._draft.nbytes + self._nbytes > self._limit:
            raise BodyTooLarge(f"file: more than {self._limit} bytes (state.max_file_bytes)")
        if self._nbytes >= PIECE_NBYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write what is gathered."""
        joined = b"".join(self._pieces)
        self._pieces, self._nbytes = [], 0
        await self._draft.write(joined)


def _purpose(fields: Fields, may_lack: bool) -> str:
    purpose = fields.text("purpose") or (USER_DATA if may_lack else "")
    if not purpose:
        raise MalformedBody("purpose: is required, for example user_data")
    if len(purpose) > _MOST_PURPOSE:
        raise MalformedBody(f"purpose: {len(purpose)} characters, the limit is {_MOST_PURPOSE}")
    return purpose


def _expiry(fields: Fields) -> float:
    """Seconds after which the file expires; 0 where the upload does not say."""
    anchor, seconds = fields.text(_ANCHOR), fields.text(_SECONDS)
    if anchor not in ("", "created_at"):
        raise MalformedBody(f"{_ANCHOR}: {anchor[:64]!a} is not created_at")
    if not seconds:
        return 0
    if not (seconds.isascii() and seconds.isdigit() and int(seconds[:12]) > 0 and len(seconds) <= 12):
        raise MalformedBody(f"{_SECONDS}: {seconds[:64]!a} is no whole number above 0")
    return int(seconds)


def _ends(files: list[File]) -> tuple[str | None, str | None]:
    return (files[0].id, files[-1].id) if files else (None, None)


class UnsatisfiableRange(InvalidInput):
    """No byte of the file is in the range that was asked for."""

    status = 416


def _span(req: Request, nbytes: int) -> range:
    """The bytes that a request asks for. A header that is no single range, or has a condition, means all bytes."""
    asked = _RANGE.fullmatch((req.get_header("Range") or "").strip())
    if asked is None or req.get_header("If-Range") or not any(asked.groups()):
        return range(nbytes)
    first, last = asked.groups()
    if not first:
        start, stop = max(nbytes - int(last), 0), nbytes
    else:
        start, stop = int(first), min(int(last) + 1, nbytes) if last else nbytes
        if last and int(last) < start:
            return range(nbytes)
    if start >= stop:
        raise UnsatisfiableRange(f"header Range: the file has {nbytes} bytes")
    return range(start, stop)


def _describe(resp: Response, file: File, span: range) -> None:
    """The head of an answer with the bytes of a file."""
    is_active = any(name in file.mime_type for name in ACTIVE)
    plain = "".join(c if c.isascii() and c not in '"\\' else "_" for c in file.name)
    named = f"filename=\"{plain}\"; filename*=UTF-8''{quote(file.name, safe='')}"
    resp.content_type = file.mime_type
    resp.content_length = len(span)
    resp.set_headers(
        {
            "Content-Disposition": f"{'attachment' if is_active else 'inline'}; {named}",
            "X-Content-Type-Options": "nosniff",
            "Accept-Ranges": "bytes",
        }
    )
    if len(span) < file.nbytes:
        resp.status = falcon.HTTP_206
        resp.set_header("Content-Range", f"bytes {span.start}-{span.stop - 1}/{file.nbytes}")
