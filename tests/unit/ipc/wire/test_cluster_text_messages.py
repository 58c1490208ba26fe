"""Pieces of text and beginnings of texts on the wire, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ipc.errors import ProtocolError
from ipc.wire.cluster import MOST_MESSAGE_NBYTES, VERSION, Taken, encode, read_to_box
from ipc.wire.cluster_text import (
    MOST_CALLS,
    MOST_COUNT,
    Before,
    Origin,
    Pieces,
    read_before,
    read_pieces,
)
from ipc.wire.messages import Written
from ipc.wire.streams import (
    CALL_CUT,
    CALLED,
    FINISHED,
    QUEUED,
    STARTED,
    TEXT,
    CalledFunction,
    Deltas,
    Finish,
    Start,
)

DELTAS = Deltas(
    [0, 0, 0, 1],
    [0, 0, 1, 0],
    [QUEUED, TEXT, CALLED, FINISHED],
    ["", "a", "", ""],
    [0, 1, 2, 0],
    calls={2: CalledFunction("f")},
    starts={0: Start(3)},
    finishes={3: Finish("stop")},
    written=[b"", b"\1\0\0\0", b"", b""],
)
PIECES = Pieces(VERSION, "a", "a1", ["r.1", "r.2"], [1, 7], DELTAS, {0: Origin("identity", 0)})
BEFORE = Before(VERSION, Written(7, [b"\1\0\0\0", b""], [False, True]), "identity", calls=[1, 0])


def changed(**fields: Any) -> bytes:
    """The pieces with other columns."""
    return encode(msgspec.structs.replace(PIECES, deltas=msgspec.structs.replace(DELTAS, **fields)))


def test_pieces_come_as_they_were_sent() -> None:
    assert read_pieces(encode(PIECES)) == PIECES
    assert read_pieces(changed(written=[])).deltas.written == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(msgspec.structs.replace(PIECES, v=VERSION + 1)),
        encode(msgspec.structs.replace(PIECES, numbers=[1])),
        encode(msgspec.structs.replace(PIECES, numbers=[0, 1])),
        encode(msgspec.structs.replace(PIECES, open=[2])),
        encode(msgspec.structs.replace(PIECES, open=[-1])),
        encode(msgspec.structs.replace(PIECES, origins={2: Origin("", 0)})),
        changed(ids=[0, 0, 0, 2]),
        changed(ids=[0, 0, 0, -1]),
        changed(choices=[0, 0, 1]),
        changed(choices=[0, 0, 1, -1]),
        changed(kinds=[QUEUED, TEXT, CALLED, CALL_CUT + 1]),
        changed(tokens=[0, -1, 2, 0]),
        changed(texts=[]),
        changed(written=[b""]),
        changed(written=[b"", b"\1\0\0", b"", b""]),
        changed(calls={}),
        changed(starts={1: Start(3)}),
        changed(kinds=[STARTED, TEXT, CALLED, FINISHED], starts={}),
        changed(finishes={}),
        changed(finishes={3: Finish("because")}),
        changed(finishes={3: Finish("stop", None, -1)}),
        changed(finishes={3: Finish("stop", None, 1, -1)}),
        changed(finishes={3: Finish("stop", None, MOST_COUNT + 1)}),
        changed(starts={0: Start(-3)}),
        changed(starts={0: Start(3, -1)}),
        changed(starts={0: Start(MOST_COUNT + 1)}),
        changed(tokens=[0, MOST_COUNT + 1, 2, 0]),
    ],
)
def test_pieces_whose_columns_disagree_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_pieces(data)


def test_a_beginning_comes_as_it_was_sent() -> None:
    assert read_before(encode(BEFORE), 2) == BEFORE
    fresh = Before(VERSION, Written(7))
    assert read_before(memoryview(encode(fresh)), 5) == fresh


@pytest.mark.parametrize(
    ("data", "choices"),
    [
        (b"\xc1", 2),
        (encode(BEFORE), 1),
        (encode(msgspec.structs.replace(BEFORE, calls=[1])), 2),
        (encode(msgspec.structs.replace(BEFORE, calls=[1, -1])), 2),
        (encode(msgspec.structs.replace(BEFORE, calls=[1, MOST_CALLS + 1])), 2),
        (encode(msgspec.structs.replace(BEFORE, deaths=-1)), 2),
        (encode(msgspec.structs.replace(BEFORE, written=Written(7, [b"\1\0\0", b""], [False, True]))), 2),
        (encode(msgspec.structs.replace(BEFORE, written=Written(7, [b"", b""], [False]))), 2),
        (encode(msgspec.structs.replace(BEFORE, v=VERSION + 1)), 2),
        (bytes(9 << 20), 2),
    ],
)
def test_a_beginning_of_another_request_is_refused(data: bytes, choices: int) -> None:
    with pytest.raises(ProtocolError):
        read_before(data, choices)


def test_a_beginning_may_have_more_ids_than_fit_into_a_message_of_brokers() -> None:
    written = Written(7, [bytes(MOST_MESSAGE_NBYTES), bytes(4)], [False, False])
    assert read_before(encode(Before(VERSION, written)), 2).written == written


def test_a_word_about_texts_has_columns_of_one_length() -> None:
    word = Taken(VERSION, "r", ["r.1"], [3], [100])
    assert read_to_box(encode(word)) == word
    for numbers, nbytes in (([], [1]), ([1], []), ([-1], [1]), ([1], [-1])):
        with pytest.raises(ProtocolError):
            read_to_box(encode(Taken(VERSION, "r", ["r.1"], numbers, nbytes)))
