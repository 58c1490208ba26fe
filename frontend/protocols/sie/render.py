"""Results on the wire: msgpack with raw arrays, or JSON.

1. Encode: msgpack is written as bytes and views on the arrays, in chunks of items that other requests run between. JSON
   is orjson over the arrays, a bounded piece at a time; a large answer is written in a thread.
2. Ranked answers are written entry by entry: a call into a serializer keeps the interpreter to itself until it is done,
   in a thread too, and an entry may hold a whole document.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Meta, UnsetType

from frontend.http.threads import Steps, in_steps
from frontend.protocols.sie.flow import EncodeUsage, ItemFault, Timing
from frontend.protocols.sie.outputs import (
    INLINE_NBYTES,
    ChunkVectors,
    DenseVector,
    MultiVector,
    Output,
    SparseVector,
    array_header,
    map_header,
    packed,
    pairs_of,
)
from frontend.sending import Buffer

JSON_CHUNK_NBYTES = 256 << 10
MSGPACK_CHUNK_ITEMS = 256
SMALL_ARRAY_NBYTES = 512
"""In large bodies arrays up to this size are copied, since a view of its own would cost more; in small ones all are."""

_ID, _ERROR = packed("id"), packed("error")


class EncodeResult(msgspec.Struct):
    """The wanted outputs of an item, in the order of the request."""

    id: Annotated[str | UnsetType, Meta(description="Id that the request gave the item.")] = UNSET
    dense: Annotated[DenseVector | UnsetType, Meta(description="One vector.")] = UNSET
    sparse: Annotated[SparseVector | UnsetType, Meta(description="Weights of terms.")] = UNSET
    multivector: Annotated[MultiVector | UnsetType, Meta(description="A vector for each token.")] = UNSET
    chunks: Annotated[
        ChunkVectors | UnsetType, Meta(description="A vector for each chunk of the document.")
    ] = UNSET
    error: Annotated[ItemFault | UnsetType, Meta(description="What went wrong.")] = UNSET


class EncodeResponse(msgspec.Struct):
    """Answer of encode; `warnings` are there when the request asks for them."""

    model: Annotated[str, Meta(description="Name of the model.")]
    items: Annotated[list[EncodeResult], Meta(description="The items, in order.")]
    timing: Annotated[Timing, Meta(description="Milliseconds by phase.")]
    usage: Annotated[EncodeUsage | UnsetType, Meta(description="Counts of tokens.")] = UNSET
    warnings: Annotated[list[str] | UnsetType, Meta(description="Tell options that are not used.")] = UNSET


@dataclass(slots=True)
class EncodedItems:
    """An encode answer: items in order, by their outputs or their error, and fields of the whole answer.

    `beside` holds the `usage` (tokens of each item, indices of cut items) and the warnings, if wanted.
    """

    model: str
    ids: Sequence[str | None]
    outputs: Sequence[Output]
    errors: dict[int, ItemFault]
    beside: dict[str, Any]

    def item(self, index: int) -> EncodeResult:
        """One item: its id if it has one, then its outputs or its error."""
        name = self.ids[index]
        item = EncodeResult() if name is None else EncodeResult(name)
        if index in self.errors:
            item.error = self.errors[index]
        else:
            for output in self.outputs:
                setattr(item, output.name, output.entry(index))
        return item

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(output.nbytes for output in self.outputs)


async def msgpack_parts(answer: EncodedItems, timing: Callable[[], Timing]) -> list[Buffer]:
    """The body as a list of bytes and views on the arrays; `timing` is called at the end, for the last part but one."""
    parts: list[Buffer] = []
    copied_nbytes = INLINE_NBYTES if answer.nbytes <= INLINE_NBYTES else SMALL_ARRAY_NBYTES
    keyed = [(packed(output.name), output) for output in answer.outputs]
    head = (map_header(3 + len(answer.beside)), packed("model"), packed(answer.model), packed("items"))
    written = bytearray(b"".join(head) + array_header(len(answer.ids)))
    for index in range(len(answer.ids)):
        if index and not index % MSGPACK_CHUNK_ITEMS:
            await asyncio.sleep(0)
        name, error = answer.ids[index], answer.errors.get(index)
        entries = (name is not None) + (1 if error is not None else len(answer.outputs))
        written += map_header(entries)
        if name is not None:
            written += _ID + packed(name)
        if error is not None:
            written += _ERROR + packed(error)
            continue
        for key, output in keyed:
            written += key
            written = output.write(parts, written, index, copied_nbytes)
    written += packed("timing")
    beside = b"".join(packed(part) for pair in answer.beside.items() for part in pair)
    return [*parts, bytes(written), packed(timing()), beside]


async def json_parts(answer: EncodedItems, timing: Callable[[], Timing]) -> list[Buffer]:
    """The body as a list of bytes; `timing` is called at the end."""
    if answer.nbytes > INLINE_NBYTES:
        items = await in_steps(_gathered(_json_items(answer)))
    else:
        items = list(_json_items(answer))
    return filled(EncodeResponse(answer.model, HOLE, timing(), **answer.beside), [b"[", *items, b"]"])


def _gathered(pieces: Iterator[bytes]) -> Steps[list[bytes]]:
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        yield
    return gathered


def _json_items(answer: EncodedItems) -> Iterator[bytes]:
    """The items between the brackets; several small ones at once, a large one in pieces."""
    count = len(answer.ids)
    each = answer.nbytes // max(1, count)
    if each > JSON_CHUNK_NBYTES:
        for index in range(count):
            yield b"," if index else b""
            yield from _json_value(answer.item(index))
        return
    per_chunk = max(1, JSON_CHUNK_NBYTES // max(1, each))
    for start in range(0, count, per_chunk):
        items = [answer.item(index) for index in range(start, min(start + per_chunk, count))]
        yield (b"," if start else b"") + json_of(items)[1:-1]


def _json_value(value: Any) -> Iterator[bytes]:
    """A value in pieces of bounded size: structs by field, large arrays by rows."""
    if isinstance(value, msgspec.Struct):
        pairs = pairs_of(value)
        for at, (name, inner) in enumerate(pairs):
            yield (b"," if at else b"{") + json_of(name) + b":"
            yield from _json_value(inner)
        yield b"}" if pairs else b"{}"
    elif isinstance(value, np.ndarray) and value.nbytes > JSON_CHUNK_NBYTES:
        per_chunk = max(1, JSON_CHUNK_NBYTES * len(value) // value.nbytes)
        for start in range(0, len(value), per_chunk):
            yield (b"," if start else b"[") + json_of(value[start : start + per_chunk])[1:-1]
        yield b"]"
    else:
        yield json_of(value)


async def json_list(entries: Iterator[Any], nbytes: int) -> list[bytes]:
    """A JSON array of entries of any size, `nbytes` of data in all; a large one is written in steps in a thread."""
    if nbytes > INLINE_NBYTES:
        return await in_steps(_gathered(_json_entries(entries)))
    return list(_json_entries(entries))


def _json_entries(entries: Iterator[Any]) -> Iterator[bytes]:
    yield b"["
    for at, entry in enumerate(entries):
        yield b"," if at else b""
        yield from _json_value(entry)
    yield b"]"


# PERF: orjson writes an array in its place; the encoder of msgspec copies the JSON of each array once more.
_entries_json = partial(orjson.dumps, default=msgspec.structs.asdict, option=orjson.OPT_SERIALIZE_NUMPY)


async def json_array(count: int, entry_nbytes: int, entry_at: Callable[[int], Any]) -> list[bytes]:
    """A JSON array of `count` entries of about `entry_nbytes` of data; other requests run between the chunks.

    An entry is a text, an array, or a struct with all of its fields set. No array is float16.
    """
    per_chunk = max(1, JSON_CHUNK_NBYTES // max(1, entry_nbytes))
    if count <= per_chunk:
        return [_entries_json(list(map(entry_at, range(count))))]
    parts = []
    for start in range(0, count, per_chunk):
        chunk = _entries_json(list(map(entry_at, range(start, min(start + per_chunk, count)))))
        parts.append((b"," if start else b"[") + chunk[1:-1])
        await asyncio.sleep(0)
    parts.append(b"]")
    return parts


def _array(value: Any) -> Any:
    """JSON of an array; float16 is written as float64, so that JSON has the exact values."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"no JSON for {type(value)}")
    wide = value.astype(np.float64) if value.dtype == np.float16 else value
    return msgspec.Raw(orjson.dumps(wide, option=orjson.OPT_SERIALIZE_NUMPY))


json_of = msgspec.json.Encoder(enc_hook=_array).encode
"""JSON of a value whose fields may be structs and numpy arrays."""
HOLE: Any = msgspec.Raw(b"\0")
"""Stands in a struct for a value that is JSON already: `filled` puts the value there. No JSON has this byte."""


def filled(answer: msgspec.Struct, *values: Sequence[Buffer]) -> list[Buffer]:
    """JSON of a struct in pieces; `values` take the places of its holes, in their order."""
    first, *rest = json_of(answer).split(b"\0")
    pieces: list[Buffer] = [first]
    for value, after in zip(values, rest, strict=True):
        pieces += (*value, after)
    return pieces


def base64_of(values: np.ndarray) -> str:
    """Numbers as base64 of little-endian float32."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


PIECE_NBYTES = 256 << 10
"""Entries are joined up to about this size."""


def listed_parts(body: msgspec.Struct | Sequence[Any], json: bool = True) -> list[bytes]:
    """A struct with lists as JSON or msgpack, written entry by entry, in pieces. A bare list is always JSON."""
    if not isinstance(body, msgspec.Struct):
        return joined(_json_list(body))
    return joined(_listed_json(body) if json else _listed_msgpack(body))


def joined(writing: Iterator[bytes]) -> list[bytes]:
    """What is written, in pieces of about `PIECE_NBYTES`."""
    pieces, piece = [], bytearray()
    for written in writing:
        piece += written
        if len(piece) >= PIECE_NBYTES:
            pieces.append(bytes(piece))
            piece.clear()
    return [*pieces, bytes(piece)]


def _listed_json(body: msgspec.Struct) -> Iterator[bytes]:
    for at, (name, value) in enumerate(pairs_of(body)):
        yield (b"," if at else b"{") + json_of(name) + b":"
        if isinstance(value, list):
            yield from _json_list(value)
        else:
            yield json_of(value)
    yield b"}"


def _json_list(entries: Iterable[Any]) -> Iterator[bytes]:
    yield b"["
    for place, entry in enumerate(entries):
        yield (b"," if place else b"") + json_of(entry)
    yield b"]"


def _listed_msgpack(body: msgspec.Struct) -> Iterator[bytes]:
    pairs = pairs_of(body)
    yield map_header(len(pairs))
    for name, value in pairs:
        yield packed(name)
        if isinstance(value, list):
            yield array_header(len(value))
            yield from map(packed, value)
        else:
            yield packed(value)
