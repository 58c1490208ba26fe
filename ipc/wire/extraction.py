"""What the extract operation finds in one item, in the field names of the SIE contract.

A worker writes it as msgpack, a frontend reads it back and renders it. Offsets count characters, end exclusive; boxes
are [x, y, width, height] in whole pixels.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Entity(msgspec.Struct, frozen=True):
    """A span of text, or a region of an image, with a label."""

    text: str
    label: str
    score: float = 1.0
    start: int | None = None
    end: int | None = None
    bbox: list[int] | None = None


class Relation(msgspec.Struct, frozen=True):
    """`head` stands in `relation` to `tail`; both are texts."""

    head: str
    tail: str
    relation: str
    score: float


class Classification(msgspec.Struct, frozen=True):
    """One label of a whole item."""

    label: str
    score: float


class DetectedObject(msgspec.Struct, frozen=True):
    """One object in an image."""

    label: str
    score: float
    bbox: list[int]


class Extraction(msgspec.Struct, frozen=True):
    """All findings of one item; a kind that the family does not find stays empty."""

    entities: list[Entity] = []
    relations: list[Relation] = []
    classifications: list[Classification] = []
    objects: list[DetectedObject] = []
    data: dict[str, Any] = {}


_decoder = msgspec.msgpack.Decoder(Extraction)


def pack(found: Extraction) -> bytes:
    """msgpack bytes of the findings of one item."""
    return msgspec.msgpack.encode(found)


def unpack(data: bytes | memoryview) -> Extraction:
    """What `pack` wrote. Raises `msgspec.DecodeError` when it is something else."""
    return _decoder.decode(data)
