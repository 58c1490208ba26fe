"""Answers with lists in pieces: the same bytes as in one, cut between entries."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import orjson
import pytest
from msgspec import UNSET, UnsetType

from frontend.protocols.sie.render import PIECE_NBYTES, listed_parts


class Body(msgspec.Struct):
    """An answer."""

    scores: list[dict[str, Any]]
    model: str = "m"
    usage: dict[str, Any] | UnsetType = UNSET


BODIES = (
    Body([], usage={}),
    Body([{"item_id": "a", "score": 1.5, "rank": 0}]),
    Body([{"item_id": f"é{at}", "rank": at} for at in range(70_000)], usage={"a": [1]}),
)


@pytest.mark.parametrize("body", BODIES, ids=["none", "one", "many"])
def test_the_pieces_are_the_whole_answer(body: Body) -> None:
    assert b"".join(listed_parts(body, json=True)) == orjson.dumps(msgspec.to_builtins(body))
    assert b"".join(listed_parts(body, json=False)) == msgpack.packb(msgspec.to_builtins(body))


@pytest.mark.parametrize("json", [True, False])
def test_no_piece_is_much_longer_than_an_entry(json: bool) -> None:
    entries = [{"document": "x" * 100_000} for _ in range(40)]
    pieces = listed_parts(Body(entries), json)
    assert len(pieces) > 10 and max(map(len, pieces)) < PIECE_NBYTES + 101_000
