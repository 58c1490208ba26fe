"""What the extract operation finds in one item, in the field names of the SIE contract.

A worker writes it as msgpack, a frontend reads it back and renders it. Offsets count characters, end exclusive; boxes
are [x, y, width, height] in whole pixels.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class Entity(msgspec.Struct, frozen=True):
    """A span of text, or a region of an image, with a label."""

    text: Annotated[str, Meta(description="The text.")]
    label: Annotated[str, Meta(description="The label.")]
    score: Annotated[float, Meta(description="How well the item fits; higher is better.")] = 1.0
    start: Annotated[int | None, Meta(description="First character.")] = None
    end: Annotated[int | None, Meta(description="The character behind the last one.")] = None
    bbox: Annotated[list[int] | None, Meta(description="Left, top, width and height in pixels.")] = None


class Relation(msgspec.Struct, frozen=True):
    """`head` stands in `relation` to `tail`; both are texts."""

    head: Annotated[str, Meta(description="The entity that the relation begins with.")]
    tail: Annotated[str, Meta(description="The entity that the relation ends with.")]
    relation: Annotated[str, Meta(description="Name of the relation.")]
    score: Annotated[float, Meta(description="How well the item fits; higher is better.")]


class Classification(msgspec.Struct, frozen=True):
    """One label of a whole item."""

    label: Annotated[str, Meta(description="The label.")]
    score: Annotated[float, Meta(description="How well the item fits; higher is better.")]


class DetectedObject(msgspec.Struct, frozen=True):
    """One object in an image."""

    label: Annotated[str, Meta(description="The label.")]
    score: Annotated[float, Meta(description="How well the item fits; higher is better.")]
    bbox: Annotated[list[int], Meta(description="Left, top, width and height in pixels.")]


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
    """What `pack` wrote. Raises `msgspec.DecodeError` for other bytes."""
    return _decoder.decode(data)
