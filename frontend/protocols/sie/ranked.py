"""Ranked answers on the wire: the list of entries is written entry by entry.

A call into a serializer keeps the interpreter to itself until it is done, in a thread too; an entry may hold a whole
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import orjson

PIECE_NBYTES = 256 << 10
"""Entries are joined up to about this size."""


def write(body: dict[str, Any], entries: str, json: bool) -> list[bytes]:
    """`body` as JSON or msgpack, in pieces; `entries` names the field with the list."""
    pieces, piece = [], bytearray()
    for written in _json(body, entries) if json else _msgpack(body, entries):
        piece += written
        if len(piece) >= PIECE_NBYTES:
            pieces.append(bytes(piece))
            piece.clear()
    return [*pieces, bytes(piece)]


def _json(body: dict[str, Any], entries: str) -> Iterator[bytes]:
    for at, (name, value) in enumerate(body.items()):
        yield (b"," if at else b"{") + orjson.dumps(name) + b":"
        if name != entries:
            yield orjson.dumps(value)
            continue
        yield b"["
        for place, entry in enumerate(value):
            yield (b"," if place else b"") + orjson.dumps(entry)
        yield b"]"
    yield b"}"


def _msgpack(body: dict[str, Any], entries: str) -> Iterator[bytes]:
    packer = msgpack.Packer()
    pack: Callable[[Any], bytes] = packer.pack
    yield packer.pack_map_header(len(body))
    for name, value in body.items():
        yield pack(name)
        if name != entries:
            yield pack(value)
            continue
        yield packer.pack_array_header(len(value))
        yield from map(pack, value)
