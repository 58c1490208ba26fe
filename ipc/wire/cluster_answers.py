"""Answers in parts between gateways and boxes.

1. A gateway sends an item of the kind `PARTS`. The box answers with `PartsTold`, then with the result of the item,
   which says how many parts came before.
2. The parts of an item are numbered from 1 without gaps. The box sends at most `Work.parts` ahead of the gateway's
   client (`ipc.wire.cluster.Taken`), and keeps what the gateway did not confirm.
3. A part too large for a message is offered, and goes alone: the box sends nothing behind it until it is taken.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ipc.errors import ProtocolError
from ipc.wire.cluster import Ids, Message, Offer, read_message

Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
Nbytes = Annotated[int, msgspec.Meta(ge=0)]


class PartBody(msgspec.Struct, array_like=True, frozen=True):
    """One part; the fields are those of `ipc.wire.cluster.Outcome`."""

    result: bytes = b""
    data: bytes = b""
    loose: bytes = b""
    result_nbytes: Nbytes = 0
    data_nbytes: Nbytes = 0
    large: Offer | None = None


class PartsTold(Message, frozen=True, tag="parts_told"):
    """A part of each item of `names`, in order; an item may be named several times."""

    box: str
    life: str
    names: Ids
    numbers: list[Number]
    parts: list[PartBody]


_parts = msgspec.msgpack.Decoder(PartsTold)


def read_parts(data: bytes) -> PartsTold:
    """Parts of answers. Raises `ProtocolError`, also for columns that disagree."""
    told = read_message(_parts, data, "parts of answers")
    if not len(told.names) == len(told.numbers) == len(told.parts):
        raise ProtocolError(
            f"{len(told.names)} items with {len(told.numbers)} numbers and {len(told.parts)} parts"
        )
    return told
