"""The routes of the SIE contract as readers: a body is read, checked, planned, run by a model, and answered.

The models run in this process (`tests.fakes.vector_server`), so an input costs about a millisecond, and whatever a
route does behind the reading of its body is explored as well.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from frontend.protocols.sie.schemas import is_msgpack
from tests.fakes.vector_server import CLASSIFIER, DENSE, PICTURES, SCORE, VectorServer
from tests.fuzz.watching import DOCUMENTED

ENTRIES = {
    ("v1", "encode"): ("items", "id"),
    ("v1", "score"): ("scores", "item_id"),
    ("v1", "extract"): ("items", "id"),
}
"""The field of an answer that has an entry for each item, and the field of the id in each, by folder of the path."""
FOLDERS = (*ENTRIES, ("v1", "embeddings"), ("v1", "rerank"))
"""Where errors have the form of this contract."""
MOST_PATH_CHARS = 200


@functools.cache
def _place() -> tempfile.TemporaryDirectory[str]:
    """A directory that the end of the process removes."""
    return tempfile.TemporaryDirectory(prefix="penstock-fuzz-")


@functools.cache
def _server() -> VectorServer:
    return VectorServer(Path(_place().name), served=(DENSE, PICTURES, SCORE, CLASSIFIER))


def sie_answer(data: bytes) -> int:
    """A path, a content type and what the client accepts, with spaces between, and a body; the status of the answer."""
    line, _, body = data.partition(b"\n")
    path, given, wanted = [*line.decode("latin-1").split(" "), "", ""][:3]
    path = path[1:MOST_PATH_CHARS]
    server = _server()
    server.engine.works.clear()
    server.engine.leases.clear()
    headers = {"Content-Type": _sendable(given), "Accept": _sendable(wanted)}
    found = server.client.simulate_post(f"/{quote(path)}", body=body, headers=headers)
    assert found.status_code < 500 or str(found.status_code) in DOCUMENTED, (found.status, found.text[:2000])
    assert all(lease.releases == 1 for lease in server.engine.leases), "kept, or given back twice"
    answer = _read(found.content, found.headers["content-type"])
    folder = tuple(path.split("/")[:2])
    if found.status_code != 200:
        detail = answer["detail"] if folder in FOLDERS else "in the form of another contract"
        assert isinstance(detail, str) or detail["message"], answer
    elif folder in ENTRIES:
        entries, item_id = ENTRIES[folder]
        ids = [one.get(item_id) for one in answer[entries]]
        assert sorted(_named(ids)) == sorted(_named([one.id for one in _read(body, given, _Sent).items]))
    return found.status_code


def _named(ids: Sequence[str | None]) -> list[str]:
    """An item without an id has one by its place in some answers, and none in others."""
    return [f"item-{place}" if one is None else one for place, one in enumerate(ids)]


def _sendable(text: str) -> str:
    """What of a text a header field may hold."""
    return "".join(letter for letter in text if letter.isprintable() and letter.isascii())


class _Item(msgspec.Struct):
    id: str | None = None


class _Sent(msgspec.Struct):
    items: list[_Item]


def _read(body: bytes, content_type: str, kind: Any = Any) -> Any:
    return (msgspec.msgpack if is_msgpack(content_type) else msgspec.json).decode(body, type=kind)
