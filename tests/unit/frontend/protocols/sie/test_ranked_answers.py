"""Answers of score and rerank in pieces: the same bytes as in one, cut between entries."""

from __future__ import annotations

from typing import Any

import msgpack
import orjson
import pytest

from frontend.protocols.sie.render import PIECE_NBYTES, ranked_parts

BODIES: tuple[dict[str, Any], ...] = (
    {"model": "m", "scores": [], "usage": {}},
    {"scores": [{"item_id": "a", "score": 1.5, "rank": 0}]},
    {
        "model": "m",
        "scores": [{"item_id": f"é{at}", "rank": at} for at in range(70_000)],
        "usage": {"a": [1]},
    },
)


@pytest.mark.parametrize("body", BODIES, ids=["none", "one", "many"])
def test_the_pieces_are_the_whole_answer(body: dict[str, Any]) -> None:
    assert b"".join(ranked_parts(body, "scores", json=True)) == orjson.dumps(body)
    assert b"".join(ranked_parts(body, "scores", json=False)) == msgpack.packb(body)


@pytest.mark.parametrize("json", [True, False])
def test_no_piece_is_much_longer_than_an_entry(json: bool) -> None:
    entries = [{"document": "x" * 100_000} for _ in range(40)]
    pieces = ranked_parts({"results": entries}, "results", json)
    assert len(pieces) > 10 and max(map(len, pieces)) < PIECE_NBYTES + 101_000
