"""Equal items of one request get equal results, whatever their places in a batch did to the last bits."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frontend.engine.answer import Answer
from frontend.engine.caching import PREFIX_CHARACTERS, Front, firsts_of, may_repeat, unify
from frontend.engine.local.engine import LocalEngine
from frontend.engine.planning import plan
from frontend.engine.streams.incoming import Delivery
from frontend.protocols.sie.score import ranking
from frontend.scope import scope_of_ids
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog
from ipc.memory import tensors
from ipc.settings import Limits, Settings
from ipc.wire.messages import Call, EncodeCall, InputItem, ItemError, Result, ScoreCall, Timing


def texts(*given: str) -> list[InputItem]:
    """Items of texts alone."""
    return [InputItem(text) for text in given]


@pytest.mark.parametrize(
    ("items", "failed", "firsts"),
    [
        (texts("a", "b", "c"), (), None),
        (texts("a", "b", "a", "b", "a"), (), [0, 1, 0, 1, 0]),
        (texts("a", "a", "a"), (0,), [0, 1, 1]),
        (texts("a", "a"), (1,), None),
        ([InputItem(ids=[1, 2]), InputItem(ids=[1]), InputItem(ids=[1, 2])], (), [0, 1, 0]),
        ([InputItem("a", images=[b"1"]), InputItem("a", images=[b"2"]), InputItem("a")], (), None),
        ([InputItem(images=[b"1"]), InputItem(images=[b"2"]), InputItem(images=[b"1"])], (), [0, 1, 0]),
        ([InputItem("a", metadata={"x": 1}), InputItem("a"), InputItem("a")], (), [0, 1, 1]),
        ([InputItem("a", first="1"), InputItem("a"), InputItem("a", first="2")], (), None),
        ([InputItem("a", first="1"), InputItem("b", first="1"), InputItem("a", first="1")], (), [0, 1, 0]),
        ([InputItem(""), InputItem(images=[b"1"]), InputItem("")], (), [0, 1, 0]),
    ],
)
def test_the_first_of_equal_items_is_found(
    items: list[InputItem], failed: tuple[int, ...], firsts: list[int] | None
) -> None:
    assert firsts_of(items, failed) == firsts
    assert may_repeat(items) or firsts is None


@pytest.mark.parametrize(
    ("items", "looked_at"),
    [
        (texts("a", "b", "c"), False),
        (texts("a" * PREFIX_CHARACTERS + "b", "c" * PREFIX_CHARACTERS + "b"), False),
        (texts("a" * PREFIX_CHARACTERS + "b", "a" * PREFIX_CHARACTERS + "c"), True),
        (texts("a", "b", "a"), True),
        ([InputItem(images=[b"1"]), InputItem(images=[b"2"])], True),
    ],
)
def test_items_that_begin_differently_are_not_looked_at_again(
    items: list[InputItem], looked_at: bool
) -> None:
    assert may_repeat(items) is looked_at


def answered(call: Call, rows: dict[str, list[int]], errors: tuple[int, ...], **arrays: np.ndarray) -> Answer:
    """What the engine gives for a call that a worker answers with these arrays."""
    refs, nbytes = tensors.layout((name, array.dtype.name, array.shape) for name, array in arrays.items())
    frame = bytearray(nbytes)
    for ref in refs:
        tensors.view(memoryview(frame), ref)[...] = arrays[ref.name]
    failed = [ItemError(index, "INFERENCE_ERROR", "failed") for index in errors]
    result = Result(1, None, refs, [3] * len(call.items), [], failed, Timing(), rows=rows)  # type: ignore[union-attr]

    async def reply(request: object, payload: object) -> Answer:
        channel: Any = SimpleNamespace(worker="worker-0", uuid="cpu")
        return Delivery(result, None, bytes(frame)).answer(channel)

    client: Any = SimpleNamespace(call=reply, inputs=None)
    recorder: Any = SimpleNamespace(in_flight=lambda model, lane: nullcontext())
    engine = Front(LocalEngine(Settings(), Catalog([]), client, Drain()), recorder)
    scope = scope_of_ids("", "", Limits())
    return asyncio.run(engine.run(scope, plan(scope, Settings(), "m", call, 10)))


def test_ties_of_equal_texts_keep_the_order_of_the_request() -> None:
    one = np.float32(0.5)
    above, below = np.nextafter(one, np.float32(1)), np.nextafter(one, np.float32(0))
    scores = np.array([one, 0.9, above, below, above], np.float32)
    call = ScoreCall(texts("a", "b", "a", "a", "a"), InputItem("q"))
    found = answered(call, {}, (), score=scores).tensors()["score"]
    assert [index for index, _ in ranking(found)] == [1, 0, 2, 3, 4]
    assert found.tolist() == [0.5, np.float32(0.9), 0.5, 0.5, 0.5]
    failed = answered(call, {}, (0,), score=scores).tensors()["score"]
    assert failed.tolist() == [0.5, np.float32(0.9), above, above, above]
    others = ScoreCall(texts("a", "b", "c", "d", "e"), InputItem("q"))
    assert np.array_equal(answered(others, {}, (), score=scores).tensors()["score"], scores)


def test_equal_items_have_the_same_vectors_of_every_kind() -> None:
    call = EncodeCall(texts("a", "b", "a"), ["dense", "sparse", "multivector"])
    reply = answered(
        call,
        {"multivector": [2, 1, 2], "sparse.indices": [1, 0, 2], "sparse.values": [1, 0, 2]},
        (),
        dense=np.array([[1.0, 2], [3, 4], [1.5, 2]], np.float32),
        multivector=np.arange(10, dtype=np.float32).reshape(5, 2),
        **{"sparse.indices": np.array([7, 8, 9], np.int32), "sparse.values": np.array([1, 2, 3], np.float32)},
    )
    found = reply.tensors()
    assert found["dense"].tolist() == [[1, 2], [3, 4], [1, 2]]
    assert found["multivector"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert reply.rows("multivector") == [2, 1, 2]
    assert (found["sparse.indices"].tolist(), found["sparse.values"].tolist()) == ([7, 7], [1, 1])
    assert reply.rows("sparse.indices") == [1, 0, 1] and found["sparse.indices"].dtype == np.int32


def test_a_lease_ends_on_the_loop_whose_socket_says_so() -> None:
    ended: list[int] = []
    reply: Any = SimpleNamespace(
        errors=[], repeat=lambda firsts: None, release=lambda: ended.append(threading.get_ident())
    )
    asyncio.run(unify(reply, texts("a", "a"), large=True))
    assert ended == [threading.get_ident()]
