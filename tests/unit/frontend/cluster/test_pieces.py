"""How a large request is cut into pieces, and what becomes of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from frontend.cluster.pieces import BATCH_TOKENS, MOST_ITEMS, MOST_NBYTES, cut, joined, together
from frontend.cluster.transfers import Room
from frontend.engine.answer import Answer
from ipc.errors import InferenceFailed, NoReplica, QueueFull
from ipc.memory.tensors import layout
from ipc.settings import Batch, Settings
from ipc.wire.messages import (
    EncodeCall,
    ExtractCall,
    InputItem,
    ItemError,
    Result,
    ScoreCall,
    Timing,
    TokenizeCall,
    Work,
)

SETTINGS = Settings()


def work(*texts: str, call: type = EncodeCall) -> Work:
    items = [InputItem(text) for text in texts]
    calls: dict[Any, Callable[[], Any]] = {
        EncodeCall: lambda: EncodeCall(items, ["dense"]),
        ScoreCall: lambda: ScoreCall(items, InputItem("q")),
        ExtractCall: lambda: ExtractCall(items, ["label"]),
        TokenizeCall: lambda: TokenizeCall(items, special=True),
    }
    return Work("m", calls[call](), 0, 10 * len(texts), "req_1")


def texts_of(pieces: list[Work]) -> list[str | None]:
    return [item.text for piece in pieces for item in piece.call.items]


@pytest.mark.parametrize("call", [EncodeCall, ScoreCall, ExtractCall])
@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["x"], 1),
        (["x"] * MOST_ITEMS, 1),
        ([f"{at}" for at in range(MOST_ITEMS + 1)], 2),
        ([f"{at}" for at in range(5 * MOST_ITEMS)], 5),
        (["x" * (4 * BATCH_TOKENS // 3)] * 5, 3),
        (["x" * (MOST_NBYTES + 1)] * 3, 3),
    ],
)
def test_a_piece_has_no_more_than_its_inputs_bytes_and_tokens(
    call: type, texts: list[str], count: int
) -> None:
    whole = work(*texts, call=call)
    pieces = cut(whole, SETTINGS)
    assert len(pieces) == count and texts_of(pieces) == texts
    assert all(len(piece.call.items) <= MOST_ITEMS for piece in pieces)
    if count > 1:
        assert sum(piece.cost for piece in pieces) <= whole.cost + count


def test_the_batch_of_the_settings_bounds_a_piece_and_other_calls_are_not_cut() -> None:
    small = Settings(batch=Batch(max_tokens=16))
    assert len(cut(work(*["12345678"] * 8), small)) == 2
    assert len(cut(work(*["x"] * 200, call=TokenizeCall), small)) == 1


def answer(*rows: float, identity: str = "w", errors: tuple[int, ...] = ()) -> Answer:
    """Each item has one row `dense` of its number, and as many rows `sparse` as its number."""
    counts = [int(row) for row in rows]
    refs, nbytes = layout([("dense", "float32", [len(rows), 2]), ("sparse", "float32", [sum(counts)])])
    data = bytearray(nbytes)
    one = Answer(
        Result(
            1,
            None,
            refs,
            [int(row) for row in rows],
            [len(rows) - 1],
            [ItemError(at, "INFERENCE_ERROR", "no") for at in errors],
            Timing(1, 2, int(rows[0]), 4, 5),
            rows={"sparse": counts},
            identity=identity,
        ),
        memoryview(data),
        worker=f"box/{rows[0]}",
    )
    one.tensors()["dense"][:] = np.asarray(rows, np.float32)[:, None]
    one.tensors()["sparse"][:] = np.repeat(np.asarray(rows, np.float32), counts)
    return one


def test_bytes_of_a_piece_are_those_of_utf_8_and_of_both_texts_of_a_pair() -> None:
    roomy = Settings(batch=Batch(max_tokens=MOST_NBYTES))
    half = "x" * (MOST_NBYTES // 2)
    assert len(cut(work(half, half), roomy)) == 1
    assert len(cut(work("\u4e16" * (MOST_NBYTES // 6), half, half), roomy)) == 2
    assert len(cut(work("\u4e16" * (MOST_NBYTES // 3), "\u4e16" * (MOST_NBYTES // 3)), roomy)) == 2
    pairs = [InputItem(half, first=half)] * 3
    assert len(cut(Work("m", EncodeCall(pairs, ["dense"]), 0, 30, "req_1"), roomy)) == 3


def test_answers_are_joined_in_the_order_of_their_pieces() -> None:
    whole = joined([answer(1, 3), answer(2), answer(4, 1)])
    assert whole is not None
    assert whole.tensors()["dense"][:, 0].tolist() == [1, 3, 2, 4, 1]
    assert whole.tensors()["sparse"].tolist() == [1, 3, 3, 3, 2, 2, 4, 4, 4, 4, 1]
    assert whole.rows("sparse") == [1, 3, 2, 4, 1] and whole.tokens == [1, 3, 2, 4, 1]
    assert whole.truncated == [1, 2, 4] and whole.identity == "w" and not whole.leased
    assert (whole.timing.prepare_ns, whole.timing.device_ns, whole.timing.batches) == (1, 4, 15)


def test_pieces_of_different_weights_are_no_answer() -> None:
    assert joined([answer(1), answer(2, identity="other")]) is None


def test_pieces_that_wait_for_others_hold_no_room_of_these() -> None:
    """Their answers lie in memory in which only one of them has room."""

    async def scene() -> None:
        room = Room(1)

        async def run(piece: Work) -> Answer:
            result, data, _ = answer(float(len(piece.call.items))).parts()
            buffer = await room.buffer(data.nbytes)
            buffer[:] = data
            return Answer(result, buffer, worker="box/worker-0")

        pieces = cut(work(*["x"] * (2 * MOST_ITEMS + 1)), SETTINGS)
        answers = await asyncio.wait_for(together(run, pieces, 2), 20)
        assert answers is not None and (whole := joined(answers)) is not None
        assert whole.tensors()["dense"][:, 0].tolist() == [64, 64, 1]
        assert whole.worker == "box/worker-0"

    asyncio.run(scene())


def test_pieces_run_at_once_and_the_first_error_ends_the_others() -> None:
    ended: list[str] = []

    async def scene() -> None:
        together_now, last = asyncio.Event(), 0

        async def run(piece: Work) -> Answer:
            nonlocal last
            last += 1
            if last == 3:
                together_now.set()
            await together_now.wait()
            return answer(float(len(piece.call.items)))

        pieces = cut(work(*["x"] * (2 * MOST_ITEMS + 1)), SETTINGS)
        found = await together(run, pieces, 3)
        assert found is not None and [one.tokens[0] for one in found] == [MOST_ITEMS, MOST_ITEMS, 1]

        async def fail(piece: Work) -> Answer:
            if len(piece.call.items) == 1:
                raise NoReplica("no box", retry_after_s=1)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")
            raise AssertionError

        with pytest.raises(NoReplica):
            await together(fail, pieces, 3)

    asyncio.run(scene())
    assert ended == ["cancelled"] * 2


def test_an_item_that_fails_has_the_request_run_as_a_whole() -> None:
    async def scene() -> None:
        pieces = [work("a"), work("b")]

        async def all_failed(piece: Work) -> Answer:
            if piece is pieces[1]:
                raise InferenceFailed("items[0]: no")
            return answer(1)

        async def some_failed(piece: Work) -> Answer:
            return answer(1, 2, errors=(1,)) if piece is pieces[1] else answer(1)

        async def no_room(piece: Work) -> Answer:
            raise QueueFull("no room", retry_after_s=1)

        for run in (all_failed, some_failed, no_room):
            assert await together(run, pieces, 2) is None

    asyncio.run(scene())


def test_only_so_many_pieces_run_at_a_time_and_in_the_lane_of_the_request() -> None:
    async def scene() -> None:
        running, most = 0, 0

        async def run(piece: Work) -> Answer:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            assert piece.lane == "bulk"
            return answer(1)

        whole = msgspec.structs.replace(work(*["x"] * (6 * MOST_ITEMS)), lane="bulk")
        found = await together(run, cut(whole, SETTINGS), 2)
        assert found is not None and len(found) == 6 and most == 2

    asyncio.run(scene())
