"""Generated text between gateways and boxes: pieces of it, and what a box needs to go on with the text of another one.

1. A gateway sends an item of the kind `TEXT`. The box answers with `Pieces`, then with the result of the item.
2. What is new of all texts of one gateway in one turn of the box's event loop is one message, whose entries have the
   columns of `ipc.wire.streams.Deltas`. The numbers of the pieces of a text begin with 1 and have no gaps.
3. Entries tell the ids of tokens as those of a worker do: the ids of a text come with the text that they stand for, or
   in a later piece where that text is too long for one. A reader takes pieces up to there together or not at all.
4. The box sends at most `WINDOW_NBYTES` ahead of the gateway's client, and keeps what the gateway did not confirm
   (`ipc.wire.cluster.Taken`).
5. An item may have the beginning of its text beside the work, a `Before`: the seed alone for a new text.

Readers take bytes of anybody, and check all places that entries name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ipc.errors import ProtocolError
from ipc.wire.cluster import MOST_NBYTES, Ids, Message, read_message
from ipc.wire.messages import Written
from ipc.wire.streams import (
    CALL_CUT,
    CALLED,
    FINISH_REASONS,
    FINISHED,
    QUEUED,
    STARTED,
    Deltas,
)

Number = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
MOST_COUNT, MOST_CALLS = 1 << 40, 1 << 16
"""Most tokens that a message may count, and most calls of a choice that a box may be told of: it notes each one."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Calls = Annotated[int, msgspec.Meta(ge=0, le=MOST_CALLS)]
_NEEDY = frozenset((FINISHED, CALLED, QUEUED, STARTED))
"""Kinds of entries of which a map has something."""
TOKEN_NBYTES = 4
"""Of each id in `Deltas.written` and `Written.choices`."""


class Origin(msgspec.Struct, array_like=True, frozen=True):
    """What writes a text: identity and weights of the model, and how many deaths of workers have cost the text a run.

    Without `is_kept` the box has no room for the ids of the text, and nobody could go on with the text.
    """

    identity: str
    deaths: Count
    weights: str = ""
    is_kept: bool = True


class Pieces(Message, frozen=True, tag="pieces"):
    """One piece for each text of `names`: entries whose `ids` are places in `names`. `numbers` are those of the pieces.

    `origins` by place: where that is new. `open`: places whose piece is no whole without the next one of the text.
    """

    box: str
    life: str
    names: Ids
    numbers: list[Number]
    deltas: Deltas
    origins: dict[int, Origin] = msgspec.field(default_factory=dict)
    open: list[int] = msgspec.field(default_factory=list)


class Before(Message, frozen=True, tag="before"):
    """The beginning of a text; see `Written`, and `frontend.engine.events.Mark` for identity, deaths and pictures.

    `moves` counts the processes and boxes that have lost the text. `calls` is the number of calls of each choice.
    `has_text`: the client has something of a choice.
    """

    written: Written
    identity: str = ""
    deaths: Count = 0
    moves: Count = 0
    pictures: str = ""
    calls: list[Calls] = msgspec.field(default_factory=list)
    has_text: bool = False


_pieces, _before = msgspec.msgpack.Decoder(Pieces), msgspec.msgpack.Decoder(Before)


def read_pieces(data: bytes) -> Pieces:
    """Pieces of text. Raises `ProtocolError`, also for columns that disagree."""
    pieces = read_message(_pieces, data, "text")
    deltas, names = pieces.deltas, len(pieces.names)
    columns = (deltas.choices, deltas.kinds, deltas.texts, deltas.tokens, deltas.written or deltas.ids)
    if names != len(pieces.numbers) or {len(column) for column in columns} != {len(deltas.ids)}:
        raise ProtocolError("the columns of a text have different lengths")
    if not _lies_in([*pieces.open, *pieces.origins], names):
        raise ProtocolError("a piece of a text has no text")
    if not _lies_in(deltas.ids, names) or not _lies_in(deltas.kinds, CALL_CUT + 1):
        raise ProtocolError("an entry of a text names no text, or is of no kind")
    if min(deltas.choices, default=0) < 0 or not _are_counts(deltas.tokens):
        raise ProtocolError("an entry of a text names no choice, or counts what are no tokens")
    if any(nbytes % TOKEN_NBYTES for nbytes in set(map(len, deltas.written))):
        raise ProtocolError("an entry of a text has a part of a token")
    _check_maps(deltas)
    return pieces


def _lies_in(places: Sequence[int], count: int) -> bool:
    return not places or (min(places) >= 0 and max(places) < count)


def _are_counts(counts: Sequence[int]) -> bool:
    return _lies_in(counts, MOST_COUNT + 1)


def _check_maps(deltas: Deltas) -> None:
    """Raise `ProtocolError` for an entry without what its kind needs, and for an end without a known reason."""
    # Metrics count these, and one that would go down ends the writing of all.
    starts = (each for start in deltas.starts.values() for each in (start.prompt_tokens, start.cached_tokens))
    ends = (each for finish in deltas.finishes.values() for each in (finish.tokens, finish.reasoning_tokens))
    if not _are_counts([*starts, *ends]):
        raise ProtocolError("a start or an end of a text counts what are no tokens")
    # PERF: nearly all messages have nothing but text.
    for at, kind in enumerate(deltas.kinds) if not _NEEDY.isdisjoint(deltas.kinds) else ():
        if kind == FINISHED:
            finish = deltas.finishes.get(at)
            if finish is None or finish.reason not in FINISH_REASONS:
                raise ProtocolError("an end of a text has no known reason")
        elif (kind == CALLED and at not in deltas.calls) or (
            kind in (QUEUED, STARTED) and at not in deltas.starts
        ):
            raise ProtocolError("an entry of a text lacks what belongs to its kind")


def read_before(data: bytes | memoryview, choices: int) -> Before:
    """The beginning of a text of so many choices. Raises `ProtocolError`, also for a beginning of others."""
    before = read_message(_before, data, "beginning of a text", MOST_NBYTES)
    written = before.written
    for column in (written.choices, written.ended, before.calls):
        if column and len(column) != choices:
            raise ProtocolError(f"the beginning of a text has {len(column)} choices, the request {choices}")
    if any(len(ids) % TOKEN_NBYTES for ids in written.choices) or len(written.ended) != len(written.choices):
        raise ProtocolError("the beginning of a text has a part of a token, or choices without an end")
    return before
