"""Encode results on the wire: msgpack with raw arrays, or JSON.

In msgpack an array is the msgpack-numpy map with bin keys; everything but its data is constant for a dtype and shape,
so it is built once and the raw bytes follow from where they lie. JSON is orjson over the arrays. Both are written in
chunks of items, so that a large answer does not hold up the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np
import orjson

from frontend.quantize import Quantized
from frontend.sending import Part

JSON_CHUNK_NBYTES = 256 << 10
MSGPACK_CHUNK_ITEMS = 256
_packer = msgpack.Packer()


@lru_cache(maxsize=256)
def array_prefix(dtype: str, shape: tuple[int, ...]) -> bytes:
    """All bytes of the msgpack-numpy map before its data, the bin header included."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(5)
    for key, value in (
        (b"nd", True),
        (b"type", np.dtype(dtype).str),
        (b"kind", b""),
        (b"shape", list(shape)),
    ):
        packer.pack(key)
        packer.pack(value)
    packer.pack(b"data")
    packed: bytes = packer.bytes()
    return packed + _bin_header(int(np.prod(shape)) * np.dtype(dtype).itemsize)


def _bin_header(nbytes: int) -> bytes:
    if nbytes < 1 << 8:
        return b"\xc4" + nbytes.to_bytes(1, "big")
    if nbytes < 1 << 16:
        return b"\xc5" + nbytes.to_bytes(2, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


class DenseRows:
    """Dense vectors of all items in their output dtype, with what is said beside them."""

    def __init__(self, quantized: Quantized, dims: int) -> None:
        self.quantized, self.dims = quantized, dims
        self.head = {"dims": dims, "dtype": quantized.dtype}

    def extras(self, index: int) -> dict[str, float]:
        """Scale and offset of one row, where the dtype has them."""
        found = (("scale", self.quantized.scale), ("offset", self.quantized.offset))
        return {name: float(values[index]) for name, values in found if values is not None}


async def msgpack_parts(
    model: str,
    ids: Sequence[str | None],
    rows: DenseRows,
    errors: dict[int, dict[str, str]],
    timing: Callable[[], dict[str, Any]],
) -> list[Part]:
    """The body as a list of bytes and views on the rows; `timing` is called at the end."""
    values = rows.quantized.values
    flat = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    width = values.shape[1] * values.itemsize
    prefix = array_prefix(values.dtype.str, values.shape[1:])
    key = _packer.pack("dense")
    fixed = b"".join(_packer.pack(part) for pair in rows.head.items() for part in pair) + _packer.pack(
        "values"
    )
    parts: list[Part] = [
        b"\x83"
        + _packer.pack("model")
        + _packer.pack(model)
        + _packer.pack("items")
        + _packer.pack_array_header(len(ids))
    ]
    for index, name in enumerate(ids):
        if index and not index % MSGPACK_CHUNK_ITEMS:
            await asyncio.sleep(0)
        named = b"" if name is None else _packer.pack("id") + _packer.pack(name)
        head = bytes([0x81 + (name is not None)]) + named
        if index in errors:
            parts.append(head + _packer.pack("error") + _packer.pack(errors[index]))
            continue
        extras = rows.extras(index)
        parts.append(head + key + bytes([0x83 + len(extras)]) + fixed + prefix)
        parts.append(flat[index * width : (index + 1) * width])
        if extras:
            parts.append(b"".join(_packer.pack(part) for pair in extras.items() for part in pair))
    parts.append(_packer.pack("timing") + _packer.pack(timing()))
    return parts


async def json_parts(
    model: str,
    ids: Sequence[str | None],
    rows: DenseRows,
    errors: dict[int, dict[str, str]],
    timing: Callable[[], dict[str, Any]],
) -> list[Part]:
    """The body as a list of bytes; `timing` is called at the end."""
    values = rows.quantized.values
    widened = values.dtype == np.float16

    def item_at(index: int) -> dict[str, Any]:
        item: dict[str, Any] = {} if ids[index] is None else {"id": ids[index]}
        if index in errors:
            item["error"] = errors[index]
        else:
            row = values[index].astype(np.float64) if widened else values[index]
            item["dense"] = {**rows.head, "values": row, **rows.extras(index)}
        return item

    items = await json_array(len(ids), values.shape[1] * values.itemsize, item_at)
    return [
        b'{"model":' + orjson.dumps(model) + b',"items":',
        *items,
        b',"timing":' + orjson.dumps(timing()) + b"}",
    ]


async def json_array(count: int, entry_nbytes: int, entry_at: Callable[[int], Any]) -> list[bytes]:
    """A JSON array of `count` entries of about `entry_nbytes` of data; other requests run between the chunks."""
    per_chunk = max(1, JSON_CHUNK_NBYTES // max(1, entry_nbytes))
    if count <= per_chunk:
        return [_json(list(map(entry_at, range(count))))]
    parts = []
    for start in range(0, count, per_chunk):
        chunk = _json(list(map(entry_at, range(start, min(start + per_chunk, count)))))
        parts.append((b"," if start else b"[") + chunk[1:-1])
        await asyncio.sleep(0)
    parts.append(b"]")
    return parts


def _json(entries: list[Any]) -> bytes:
    return orjson.dumps(entries, option=orjson.OPT_SERIALIZE_NUMPY)
