"""Rows and large values of stored objects, as the brokers of a cluster keep them for gateways.

A row of SQLite has one value of a bucket, under a key that is a digest: `key_of`. So no text of a client is part of a
subject. What is too large for a message lies in parts under a name of its own, with a `Large` in its place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ipc.wire.cluster import Message, read_message

Value = None | int | float | str | bytes
"""What SQLite keeps in a column."""
_KINDS = frozenset((type(None), int, float, str, bytes))
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}-[0-9a-f]{32}")
_KEY = re.compile(r"[a-z]{1,32}\.[0-9a-f]{32}")


class Large(Message, frozen=True, tag="large"):
    """Bytes in `parts` parts; `digest` is BLAKE2b of 16 bytes over all of them."""

    name: str
    nbytes: int
    parts: int
    digest: bytes


class KeptRow(Message, frozen=True, tag="row"):
    """A row of a table: its values in the order of the columns, or where these lie."""

    table: str
    values: list[Any]
    large: Large | None = None


_row = msgspec.msgpack.Decoder(KeptRow)
_large = msgspec.msgpack.Decoder(Large)
_values = msgspec.msgpack.Decoder(list[Any])


def read_row(data: bytes) -> KeptRow:
    """A row. Raises `ProtocolError`."""
    return read_message(_row, data, "stored row")


def read_large(data: bytes) -> Large:
    """The description of bytes in parts. Raises `ProtocolError`."""
    return read_message(_large, data, "description of parts")


def read_values(data: bytes) -> list[Any]:
    """The values of a large row. Raises `msgspec.DecodeError`, `ValueError` and `RecursionError`."""
    return _values.decode(data)


def are_values(values: Sequence[Any]) -> bool:
    """Whether SQLite keeps all of these as they are."""
    return all(type(value) in _KINDS for value in values)


def values_of(row: Sequence[Any]) -> bytes:
    """`read_values` reversed."""
    return msgspec.msgpack.encode(list(row))


def key_of(table: str, columns: Sequence[Any]) -> str:
    """The key of the row whose columns of identity have these values."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(list(columns)), digest_size=16)
    return f"{table}.{digest.hexdigest()}"


def is_key(text: str) -> bool:
    """Whether `text` can be the key of a row."""
    return _KEY.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether `text` can be the name of bytes in parts."""
    return _NAME.fullmatch(text) is not None
