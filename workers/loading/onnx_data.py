"""Data of an ONNX program that lie in files beside the program (`model.onnx.data` and the like).

onnxruntime maps such files, so their content is handed to the session in memory. The names are in the program, which is
a protocol buffer: the walk goes through the messages that may hold tensors and skips all else without reading. Numbers
of fields are those of onnx.proto (IR version 13).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

_INSIDE = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {1: "text", 2: "text"},
}
"""Fields of each message that are followed, with what they hold."""
_LOCATION = b"location"
_MOST_LEVELS = 100
"""Levels of messages, of which onnxruntime allows as many."""
_MOST_NAME_BYTES = 4096
_FIXED_BYTES = {1: 8, 5: 4}


def external_files(program: Path) -> dict[str, Path]:
    """Files with data of an ONNX program, by the name that the program has for them.

    Files outside of the program's directory are left out, and so is what a damaged program names: onnxruntime refuses
    both in its own words.
    """
    home = program.parent.resolve()
    found: dict[str, Path] = {}
    try:
        with program.open("rb") as stream:
            for name in _locations(stream, "model", os.fstat(stream.fileno()).st_size):
                path = (home / os.fsdecode(name)).resolve()
                if path.is_relative_to(home) and path.is_file():
                    found[name.decode()] = path
    except (OSError, ValueError, EOFError):
        return found
    return found


def nbytes_of(program: Path, outside: Mapping[str, Path]) -> int:
    """Bytes of a program and of its files (`external_files`)."""
    return sum(path.stat().st_size for path in {program, *outside.values()})


def _locations(stream: BinaryIO, message: str, end: int, level: int = 0) -> Iterator[bytes]:
    """Names of files in the message that goes on until the byte `end`. Raises ValueError, EOFError when damaged."""
    if level > _MOST_LEVELS:
        raise ValueError("too many levels")
    key = b""
    for field, size in _fields(stream, end):
        held, after = _INSIDE[message].get(field), stream.tell() + size
        if held == "text" and size <= _MOST_NAME_BYTES:
            text = stream.read(size)
            if field == 2 and key == _LOCATION:
                yield text
            key = text
        elif held in _INSIDE:
            yield from _locations(stream, held, after, level + 1)
        stream.seek(after)


def _fields(stream: BinaryIO, end: int) -> Iterator[tuple[int, int]]:
    """(number, bytes) of each field that holds bytes; the stream stands at its content, and is to be moved behind."""
    while stream.tell() < end:
        field, kind = divmod(_varint(stream), 8)
        if kind == 0:
            _varint(stream)
        elif kind == 2:
            size = _varint(stream)
            if stream.tell() + size > end:
                raise EOFError
            yield field, size
        elif kind in _FIXED_BYTES:
            stream.seek(_FIXED_BYTES[kind], os.SEEK_CUR)
        else:
            raise ValueError("no protocol buffer")


def _varint(stream: BinaryIO) -> int:
    number = shift = 0
    while shift < 64:
        [byte] = stream.read(1) or (None,)
        if byte is None:
            raise EOFError
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number
        shift += 7
    raise ValueError("no protocol buffer")
