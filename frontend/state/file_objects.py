"""A stored file as answers show the file: metadata, and the body where the body is short.

| file | body |
|---|---|
| text (all bytes are UTF-8) | `text` and `preview`; above `INLINE_NBYTES` only `preview` |
| other | `data_base64`; above `INLINE_NBYTES` none |
| placeholder | `code` and `message` |

Texts are read in pieces, so that the memory of a read does not grow with the file.
"""

from __future__ import annotations

import base64
import codecs
import os
from collections.abc import Iterator
from typing import Any

from frontend.state.content import PIECE_NBYTES
from frontend.state.files import File, FileStore

INLINE_NBYTES = 8 << 20
"""Bytes of the longest body that an answer holds."""
PREVIEW_NBYTES = 1024
MAX_SLICE_CHARS = 65_536
"""Characters that one read of a text returns at most."""


async def file_object(files: FileStore, file: File, *, with_body: bool = True) -> dict[str, Any]:
    """The File object of answers and events; `with_body` false leaves the body out.

    Raises `FileNotFound` for a content that has been deleted, and `StateUnavailable`.
    """
    shown = _described(file)
    if file.placeholder is not None:
        return shown | {"code": file.placeholder.code, "message": file.placeholder.message}
    if not file.content or not with_body:
        return shown
    return shown | await files.reading(file, lambda descriptor: _body(descriptor, file.nbytes))


def _described(file: File) -> dict[str, Any]:
    return {
        "id": file.id,
        "name": file.name,
        **({"format": file.format} if file.format else {}),
        "mime_type": file.mime_type,
        "bytes": file.nbytes,
        "created_at": int(file.created),
        "purpose": file.purpose,
        "source": file.origin._asdict(),
    }


def _body(descriptor: int, nbytes: int) -> dict[str, Any]:
    if nbytes > INLINE_NBYTES:
        text = _beginning(descriptor, PREVIEW_NBYTES)
        return {} if text is None else {"preview": text}
    body = b"".join(_pieces(descriptor))
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(body).decode()}
    return {"text": text, "preview": _cut(body, PREVIEW_NBYTES)}


async def preview(files: FileStore, file: File, nbytes: int = PREVIEW_NBYTES) -> str | None:
    """The first `nbytes` of a text without a character that does not fit; None for what is no text.

    Raises as `FileStore.open`.
    """
    return await files.reading(file, lambda descriptor: _beginning(descriptor, nbytes))


async def text_slice(files: FileStore, file: File, start: int, end: int) -> tuple[str, int] | None:
    """Characters `start` to `end` of a text, at most `MAX_SLICE_CHARS`, and how many the text has; None for no text.

    Raises as `FileStore.open`.
    """
    stop = min(end, start + MAX_SLICE_CHARS)
    return await files.reading(file, lambda descriptor: _slice(descriptor, start, stop))


def _beginning(descriptor: int, nbytes: int) -> str | None:
    return None if _slice(descriptor, 0, 0) is None else _cut(os.pread(descriptor, nbytes, 0), nbytes)


def _cut(body: bytes, nbytes: int) -> str:
    return body[:nbytes].decode(errors="ignore")


def _slice(descriptor: int, start: int, stop: int) -> tuple[str, int] | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    taken, seen = list[str](), 0
    try:
        for piece in _pieces(descriptor):
            text = decoder.decode(piece)
            taken.append(text[max(start - seen, 0) : max(stop - seen, 0)])
            seen += len(text)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return "".join(taken), seen


def _pieces(descriptor: int) -> Iterator[bytes]:
    offset = 0
    while piece := os.pread(descriptor, PIECE_NBYTES, offset):
        yield piece
        offset += len(piece)
