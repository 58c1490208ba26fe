"""Values and numpy arrays in the msgpack form of the SIE contract.

An array is the msgpack-numpy map with bin keys. Everything but its data is constant for a dtype and shape, so it is
built once and the raw bytes follow from where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from frontend.resources.sending import Buffer

_packer = msgpack.Packer()


def packed(value: Any) -> bytes:
    """One value without arrays."""
    done: bytes = _packer.pack(value)
    return done


@lru_cache(maxsize=4096)
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
    head: bytes = packer.bytes()
    return head + _bin_header(int(np.prod(shape)) * np.dtype(dtype).itemsize)


def _bin_header(nbytes: int) -> bytes:
    if nbytes < 1 << 8:
        return b"\xc4" + nbytes.to_bytes(1, "big")
    if nbytes < 1 << 16:
        return b"\xc5" + nbytes.to_bytes(2, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


def map_header(entries: int) -> bytes:
    """The bytes in front of a map of that many entries."""
    header: bytes = _packer.pack_map_header(entries)
    return header


def array_header(entries: int) -> bytes:
    """The bytes in front of an array of that many entries."""
    header: bytes = _packer.pack_array_header(entries)
    return header


@lru_cache(maxsize=256)
def _name(text: str) -> bytes:
    return packed(text)


def append_map(
    parts: list[Buffer], open_bytes: bytearray, values: Mapping[str, Any], copied_nbytes: int
) -> bytearray:
    """Write a map whose values may be arrays and maps.

    Bytes go into `open_bytes`; an array larger than `copied_nbytes` closes them and goes into `parts` as a view.
    Returns the open bytes.
    """
    open_bytes += map_header(len(values))
    for name, value in values.items():
        open_bytes = append_pair(parts, open_bytes, name, value, copied_nbytes)
    return open_bytes


def append_pair(
    parts: list[Buffer], open_bytes: bytearray, name: str, value: Any, copied_nbytes: int
) -> bytearray:
    """Write one entry of such a map; arguments and result as in `append_map`."""
    open_bytes += _name(name)
    if isinstance(value, np.ndarray):
        return _append_array(parts, open_bytes, value, copied_nbytes)
    if isinstance(value, dict):
        return append_map(parts, open_bytes, value, copied_nbytes)
    open_bytes += packed(value)
    return open_bytes


def _append_array(
    parts: list[Buffer], open_bytes: bytearray, values: np.ndarray, copied_nbytes: int
) -> bytearray:
    open_bytes += array_prefix(values.dtype.str, values.shape)
    if values.nbytes <= copied_nbytes:
        open_bytes += values.tobytes()
        return open_bytes
    parts.append(bytes(open_bytes))
    parts.append(memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data))
    return bytearray()
