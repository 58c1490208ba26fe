"""Rows of a reply in their output form: the lease ends as soon as they are copies, and stays while they are views."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from frontend.engine.answer import OUTPUT_DTYPES, quantize, shorten
from frontend.protocols.sie.outputs import INLINE_NBYTES, dense_of
from ipc.errors import LeaseRevoked
from tests.fakes.reply import FakeReply

DIMS = 64
SMALL = np.random.default_rng(7).standard_normal((5, DIMS)).astype(np.float32)
LARGE = np.random.default_rng(7).standard_normal((INLINE_NBYTES // DIMS // 4 + 1, DIMS)).astype(np.float32)


def converted(reply: FakeReply, dtype: str, dimensions: int | None) -> Any:
    """The rows of `reply`."""
    return asyncio.run(dense_of(reply, dtype, dimensions))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dimensions", [None, DIMS])
def test_rows_as_they_lie_keep_their_lease(rows: np.ndarray, dimensions: int | None) -> None:
    reply = FakeReply(rows)
    found = converted(reply, "float32", dimensions)
    assert reply.releases == 0
    np.testing.assert_array_equal(found.quantized.values, rows)
    assert found.entry(0).dims == DIMS


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dimensions", [None, DIMS, 16])
@pytest.mark.parametrize("dtype", OUTPUT_DTYPES[1:])
def test_converted_rows_are_right_and_need_no_lease(
    rows: np.ndarray, dimensions: int | None, dtype: str
) -> None:
    reply = FakeReply(rows)
    found = converted(reply, dtype, dimensions)
    assert reply.releases == 1
    expected = quantize(rows if dimensions is None else shorten(rows, dimensions), dtype)
    np.testing.assert_array_equal(found.quantized.values, expected.values)
    assert found.entry(0).dims == (dimensions or DIMS)


@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
def test_rows_of_a_revoked_block_are_not_used(rows: np.ndarray) -> None:
    reply = FakeReply(rows)
    reply.revoke()
    with pytest.raises(LeaseRevoked):
        converted(reply, "int8", None)


def test_large_rows_are_converted_while_others_run() -> None:
    async def turns_beside(rows: np.ndarray) -> int:
        reply, turns = FakeReply(rows), 0
        work = asyncio.ensure_future(dense_of(reply, "int8", None))  # type: ignore[arg-type]
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(turns_beside(SMALL)) == 1
    assert asyncio.run(turns_beside(LARGE)) > 1
