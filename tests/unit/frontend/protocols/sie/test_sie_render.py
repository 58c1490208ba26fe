"""Bodies of the SIE contract: both forms hold the same values, and large ones do not hold up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import numpy as np
import orjson
import pytest

from frontend.engine.answer import OUTPUT_DTYPES, quantize
from frontend.protocols.sie.flow import ItemFault
from frontend.protocols.sie.outputs import Dense, Multivector, Output, Sparse, array_prefix, pairs_of
from frontend.protocols.sie.render import EncodedItems, json_array, json_parts, msgpack_parts

RANDOM = np.random.default_rng(3)
TIMING = {"total_ms": 1.5}
FAILED = 1


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


def outputs_for(count: int, dtype: str, tokens: int = 3, width: int = 128) -> list[Output]:
    """All three outputs of `count` items; item n has n % `tokens` token vectors and terms, so some have none."""
    rows = [number % tokens for number in range(count)]
    dense = RANDOM.standard_normal((count, width)).astype(np.float32)
    vectors = RANDOM.standard_normal((sum(rows), width)).astype(np.float32)
    weights = RANDOM.random(sum(rows)).astype(np.float16 if dtype == "float16" else np.float32)
    return [
        Dense(quantize(dense, dtype), width),
        Sparse(np.arange(sum(rows), dtype=np.int32), weights, rows, 99),
        Multivector(quantize(vectors, dtype), width, rows),
    ]


def body_of(render: Callable[..., Any], outputs: list[Output], count: int) -> tuple[bytes, int]:
    """A rendered body of items named by their number, the second of which failed, and the turns of others."""
    ids: list[str | None] = [str(number) for number in range(count)]
    errors = {FAILED: ItemFault("INFERENCE_ERROR", "failed")}
    usage = {"tokens": [7] * count, "truncated": [0]}
    parts, turns = turns_during(
        render(EncodedItems("m", ids, outputs, errors, {"usage": usage}), lambda: TIMING)
    )
    return b"".join(parts), turns


def restored(value: Any) -> Any:
    """A msgpack-numpy map as an array, anything else as it is."""
    if not isinstance(value, dict):
        return value
    return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"])


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
@pytest.mark.parametrize(
    ("count", "tokens", "width"), [(2, 3, 128), (5, 3, 13), (300, 4, 128), (3, 900, 128)]
)
def test_both_forms_hold_the_same_values_in_any_number_of_pieces(
    count: int, tokens: int, width: int, dtype: str
) -> None:
    outputs = outputs_for(count, dtype, tokens, width)
    as_json = orjson.loads(body_of(json_parts, outputs, count)[0])
    packed = msgpack.unpackb(body_of(msgpack_parts, outputs, count)[0], strict_map_key=False)
    assert list(as_json) == list(packed) == ["model", "items", "timing", "usage"]
    assert as_json["usage"] == packed["usage"] == {"tokens": [7] * count, "truncated": [0]}
    assert [item["id"] for item in as_json["items"]] == [str(number) for number in range(count)]
    for index, (one, other) in enumerate(zip(as_json["items"], packed["items"], strict=True)):
        if index == FAILED:
            assert one == other and set(one) == {"id", "error"}
            continue
        assert list(one) == list(other) == ["id", "dense", "sparse", "multivector"]
        for output in outputs:
            expected = dict(pairs_of(output.entry(index)))
            assert list(one[output.name]) == list(other[output.name]) == list(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(restored(other[output.name][name]), value)
                if isinstance(value, np.ndarray):
                    shown = np.array(one[output.name][name], value.dtype).reshape(value.shape)
                    np.testing.assert_array_equal(shown, value)
                else:
                    assert one[output.name][name] == value


def test_empty_outputs_are_empty_arrays_in_both_forms() -> None:
    outputs = outputs_for(3, "float32")
    packed = msgpack.unpackb(body_of(msgpack_parts, outputs, 3)[0], strict_map_key=False)["items"][0]
    assert packed["sparse"]["indices"] == {
        b"nd": True,
        b"type": "<i4",
        b"kind": b"",
        b"shape": [0],
        b"data": b"",
    }
    assert packed["multivector"]["values"][b"shape"] == [0, 128]
    shown = orjson.loads(body_of(json_parts, outputs, 3)[0])["items"][0]
    assert shown["sparse"]["indices"] == shown["sparse"]["values"] == shown["multivector"]["values"] == []


def test_the_bytes_before_an_array_are_those_of_the_contract() -> None:
    """Examples of the contract, byte for byte."""
    wanted = "85c4026e64c3c40474797065a33c6634c4046b696e64c400c40573686170659102c40464617461c408"
    assert array_prefix("<f4", (2,)).hex() == wanted
    assert array_prefix("<f4", (1, 2)).hex() == wanted.replace("9102", "920102")
    assert array_prefix("<f4", (0, 4)).hex().endswith("920004c40464617461c400")
    assert array_prefix("|u1", (300,)).hex().endswith("91cd012cc40464617461c5012c")
    assert array_prefix("|i1", (70000,)).hex().endswith("91ce00011170c40464617461c600011170")


@pytest.mark.parametrize("render", [json_parts, msgpack_parts])
def test_others_run_while_a_large_body_is_written_and_a_small_one_is_written_at_once(render: Any) -> None:
    rows = RANDOM.standard_normal((3000, 256)).astype(np.float32)
    assert body_of(render, [Dense(quantize(rows, "float32"), 256)], 3000)[1] >= 8
    assert body_of(render, [Dense(quantize(rows[:4], "float32"), 256)], 4)[1] == 0


def test_large_arrays_are_views_and_not_copies_in_msgpack() -> None:
    rows = RANDOM.standard_normal((4096, 128)).astype(np.float32)
    answer = EncodedItems("m", [None], [Multivector(quantize(rows, "float32"), 128, [4096])], {}, {})
    parts = asyncio.run(msgpack_parts(answer, lambda: TIMING))
    [view] = [part for part in parts if isinstance(part, memoryview)]
    assert np.shares_memory(np.frombuffer(view, np.uint8), rows) and view.nbytes == rows.nbytes


def test_many_vectors_cost_no_copy_of_them() -> None:
    rows = RANDOM.standard_normal((3000, 256)).astype(np.float32)
    answer = EncodedItems("m", [None] * 3000, [Dense(quantize(rows, "float32"), 256)], {}, {})
    parts = asyncio.run(msgpack_parts(answer, lambda: TIMING))
    assert sum(len(part) for part in parts if isinstance(part, bytes)) < rows.nbytes / 4


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_an_array_is_the_same_in_any_number_of_chunks(count: int) -> None:
    parts, _ = turns_during(json_array(count, 100 << 10, lambda index: {"index": index}))
    assert orjson.loads(b"".join(parts)) == [{"index": index} for index in range(count)]
