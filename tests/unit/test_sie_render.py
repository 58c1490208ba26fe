"""Bodies of the SIE contract: large ones are written in chunks that other requests run between, small ones at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest

from frontend.protocols.sie.render import DenseRows, json_array, json_parts, msgpack_parts
from frontend.quantize import OUTPUT_DTYPES, quantize

RANDOM = np.random.default_rng(3)
TIMING = {"total_ms": 1.5}


def turns_during(work: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """The result of `work`, and how often another task got a turn meanwhile."""

    async def counted() -> tuple[Any, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.ensure_future(other())
        result = await work
        task.cancel()
        return result, turns

    return asyncio.run(counted())


def body_of(render: Callable[..., Any], rows: np.ndarray, dtype: str = "float32") -> tuple[bytes, int]:
    """A rendered body of rows named by their number, the second of which failed, and the turns of others."""
    ids: list[str | None] = [str(number) for number in range(len(rows))]
    dense = DenseRows(quantize(rows, dtype), rows.shape[1])
    errors = {1: {"code": "INFERENCE_ERROR", "message": "failed"}}
    parts, turns = turns_during(render("m", ids, dense, errors, lambda: TIMING))
    return b"".join(parts), turns


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
@pytest.mark.parametrize("count", [2, 5, 1000])
def test_both_forms_hold_the_same_values_in_any_number_of_chunks(count: int, dtype: str) -> None:
    rows = RANDOM.standard_normal((count, 128)).astype(np.float32)
    as_json = orjson.loads(body_of(json_parts, rows, dtype)[0])
    packed = msgpack.unpackb(body_of(msgpack_parts, rows, dtype)[0], strict_map_key=False)
    assert list(as_json) == list(packed) == ["model", "items", "timing"]
    assert [item["id"] for item in as_json["items"]] == [str(number) for number in range(count)]
    expected = quantize(rows, dtype).values
    for index, (one, other) in enumerate(zip(as_json["items"], packed["items"], strict=True)):
        if index == 1:
            assert one == other and one["error"]["code"] == "INFERENCE_ERROR"
            continue
        raw = other["dense"]["values"]
        np.testing.assert_array_equal(np.frombuffer(raw[b"data"], raw[b"type"]), expected[index])
        np.testing.assert_array_equal(np.array(one["dense"]["values"], expected.dtype), expected[index])


@pytest.mark.parametrize("render", [json_parts, msgpack_parts])
def test_others_run_while_a_large_body_is_written_and_a_small_one_is_written_at_once(render: Any) -> None:
    large = RANDOM.standard_normal((3000, 256)).astype(np.float32)
    assert body_of(render, large)[1] >= 8
    assert body_of(render, large[:4])[1] == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_an_array_is_the_same_in_any_number_of_chunks(count: int) -> None:
    parts, _ = turns_during(json_array(count, 100 << 10, lambda index: {"index": index}))
    assert orjson.loads(b"".join(parts)) == [{"index": index} for index in range(count)]
