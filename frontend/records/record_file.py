"""Small files of fixed places in the run directory: one frontend writes records, all frontends read the records.

A place is `number, length, checksum, payload`, and zeros behind. A place with the number 0 is empty. If a checksum is
wrong, the frontend may be writing the place at this moment, or was killed in the middle.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path

import numpy as np

_HEADER = struct.Struct("<QII")


class RecordFile:
    """A mapped file of `count` places of `nbytes` bytes. Only the frontend that owns the file writes."""

    def __init__(self, path: Path, count: int, nbytes: int) -> None:
        """Open or create the file, with the records of an earlier life. Raises `OSError` without room on the disk."""
        self._nbytes = nbytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A hole in the file would be a SIGBUS on the day on which the disk is full.
            os.posix_fallocate(fd, 0, count * nbytes)
            self._map = mmap.mmap(fd, count * nbytes)
        finally:
            os.close(fd)

    @property
    def room(self) -> int:
        """Bytes of the longest payload."""
        return self._nbytes - _HEADER.size

    def numbers(self) -> np.ndarray:
        """The number of each place, uint64 [count]."""
        return numbers_in(bytes(self._map), self._nbytes)

    def put(self, place: int, number: int, payload: bytes) -> None:
        """Replace a record, whose number is above 0."""
        header = _HEADER.pack(number, len(payload), zlib.crc32(payload))
        self._write(place, header + payload)

    def clear(self, place: int) -> None:
        """Make a place empty."""
        self._write(place, b"")

    def _write(self, place: int, record: bytes) -> None:
        start = place * self._nbytes
        self._map[start : start + self._nbytes] = record.ljust(self._nbytes, b"\0")

    def close(self) -> None:
        """Unmap the file, which stays."""
        self._map.close()


def numbers_in(data: bytes, nbytes: int) -> np.ndarray:
    """The number of each place of a file with places of `nbytes` bytes, uint64 [count]."""
    numbers = np.dtype({"names": ["number"], "formats": ["<u8"], "offsets": [0], "itemsize": nbytes})
    return np.frombuffer(data, numbers)["number"]


def payload_in(data: bytes, place: int, nbytes: int) -> bytes | None:
    """The payload of a place; None where the checksum is wrong."""
    start = place * nbytes
    _, length, checksum = _HEADER.unpack_from(data, start)
    if length > nbytes - _HEADER.size:
        return None
    start += _HEADER.size
    payload = data[start : start + length]
    return payload if zlib.crc32(payload) == checksum else None
