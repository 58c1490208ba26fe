"""Values of a bucket that are too large for one message: cut into parts, each under a key of its own.

1. `cut` makes of a value the parts, and a head under the key of the value. A writer puts the parts before the head, so
   that whoever hears the head has heard the parts.
2. `joined` gives the value of a head whose parts are all there, and any other value as it is. The head has the digest
   of the whole, and each part too: parts of an earlier value are none of a later one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec

from ipc.errors import ProtocolError
from ipc.wire.cluster import MOST_MESSAGE_NBYTES, VERSION, Message, encode, read_message

PART_NBYTES = 64 << 10
"""Larger values are cut."""
SLACK_NBYTES = 64
"""Of a part beside its data."""
MOST_PARTS = 4096
PART = ".part"
_TAG = b"\xa8row_head"
_DIGEST_NBYTES = 16


class Head(Message, frozen=True, tag="row_head"):
    """What stands under the key of a value: how many parts the value has, and the BLAKE2b digest of the whole."""

    digest: bytes
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_PARTS)]


class Part(Message, frozen=True, tag="row_part"):
    """One part of the value with this digest."""

    digest: bytes
    data: bytes


_head, _part = msgspec.msgpack.Decoder(Head), msgspec.msgpack.Decoder(Part)


def part_key(key: str, number: int) -> str:
    """Key of a part of a value; the first has the number 0."""
    return f"{key}{PART}{number}"


def is_part(key: str) -> bool:
    """Whether a key is that of a part."""
    return PART in key


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


def cut(key: str, value: bytes, most: int) -> dict[str, bytes]:
    """What to write for a value, by key, so that nothing has more than `most` bytes or `PART_NBYTES`; parts first."""
    most = min(most, PART_NBYTES)
    if len(value) <= most:
        return {key: value}
    each = max(most - SLACK_NBYTES, -(-len(value) // MOST_PARTS))
    digest, starts = _digest(value), range(0, len(value), each)
    found = {
        part_key(key, number): encode(Part(VERSION, digest, value[at : at + each]))
        for number, at in enumerate(starts)
    }
    return {**found, key: encode(Head(VERSION, digest, len(starts)))}


def joined(key: str, data: bytes, parts: Mapping[str, bytes]) -> bytes:
    """The value of a key that is none of a part, of which `data` was read; `parts` by their keys.

    Raises `ProtocolError` where parts lack, or are those of another value.
    """
    if data[1 : 1 + len(_TAG)] != _TAG:
        return data
    head, found, nbytes = read_message(_head, data, "head of a value"), list[bytes](), 0
    for number in range(head.count):
        part = read_message(_part, parts.get(part_key(key, number), b""), "part of a value")
        nbytes += len(part.data)
        if part.digest != head.digest or nbytes > MOST_MESSAGE_NBYTES:
            raise ProtocolError("a value lacks its parts, or has too many bytes")
        found.append(part.data)
    whole = b"".join(found)
    if _digest(whole) != head.digest:
        raise ProtocolError("the parts of a value are not those that were written")
    return whole
