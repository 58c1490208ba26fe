"""What images cost before they are prepared, and how long one request may keep a preparing thread busy."""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import msgpack
import msgspec
import pytest

from frontend.engine.planning import cost_of
from frontend.http.fields import LONG_NBYTES, UNCHECKED_NBYTES, without_long_values
from ipc.settings import Limits
from ipc.wire.messages import Call, EncodeCall, InputItem, ModelStatus, ScoreCall
from workers.scheduling.preparing import CHUNK_IMAGES, CHUNK_ITEMS, chunk_end

TEXT, IMAGE, ALBUM = InputItem("river"), InputItem(images=[b"a"]), InputItem(images=[b"a", b"b"])
STATUS = ModelStatus("m", "loaded", max_sequence_length=77, image_tokens=1024)


@pytest.mark.parametrize(
    ("call", "images"),
    [
        (EncodeCall([TEXT, TEXT], []), 0),
        (EncodeCall([TEXT, IMAGE, ALBUM], []), 2),
        (ScoreCall([IMAGE, IMAGE], TEXT), 2),
        (ScoreCall([TEXT, IMAGE], IMAGE), 2),
    ],
)
def test_every_item_with_an_image_counts_once_and_the_query_too(call: Call, images: int) -> None:
    without = msgspec.structs.replace(STATUS, image_tokens=0)
    assert cost_of(call, STATUS, Limits()) - cost_of(call, without, Limits()) == images * 1024


def test_a_text_that_is_split_costs_all_of_its_tokens() -> None:
    items, limits = [InputItem("x" * 4000), InputItem("x" * 400_000)], Limits(max_chunked_tokens=5000)
    assert cost_of(EncodeCall(items, [], overflow="truncate"), STATUS, limits) == 2 * 77
    assert cost_of(EncodeCall(items, [], overflow="chunk"), STATUS, limits) == 1002 + 5000


def test_token_ids_cost_as_many_tokens_as_there_are() -> None:
    assert cost_of(EncodeCall([InputItem(ids=[1] * 40)], []), STATUS, Limits()) == 42


def test_a_chunk_of_images_is_short_and_one_of_texts_is_not() -> None:
    assert chunk_end(EncodeCall([TEXT] * 500, []), 0) == CHUNK_ITEMS
    assert chunk_end(EncodeCall([TEXT] * 500, []), 490) == 500
    assert chunk_end(EncodeCall([IMAGE] * 500, []), 3) == 3 + CHUNK_IMAGES
    mixed = [TEXT, IMAGE] * 50
    ends = [0]
    while ends[-1] < len(mixed):
        ends.append(chunk_end(EncodeCall(mixed, []), ends[-1]))
        assert 0 < sum(bool(item.images) for item in mixed[ends[-2] : ends[-1]]) <= CHUNK_IMAGES
    assert ends[-1] == len(mixed)


def body_of(value: Any, binary: bool) -> bytes:
    """`value` as a body; bytes become base64 in JSON."""
    if binary:
        packed: bytes = msgpack.packb(value)
        return packed
    return json.dumps(value, default=lambda data: base64.b64encode(data).decode()).encode()


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
def test_long_values_are_taken_out_and_names_stay(binary: bool) -> None:
    images = [{"data": os.urandom(300_000), "format": "png"} for _ in range(3)]
    short = {"items": [{"id": "a", "text": "x" * (LONG_NBYTES // 2), "images": []}]}
    whole = {"items": [{"id": "a", "text": "x" * (LONG_NBYTES // 2), "images": images}]}
    left = without_long_values(body_of(whole, binary), binary)
    assert len(left) < len(body_of(short, binary)) + 200
    for name, times in (
        (b"items", 1),
        (b"id", 1),
        (b"text", 1),
        (b"images", 1),
        (b"data", 3),
        (b"format", 3),
    ):
        assert left.count(name) == times, name
    assert b"x" * (LONG_NBYTES // 2) in left


@pytest.mark.parametrize("binary", [True, False], ids=["msgpack", "json"])
def test_bodies_of_many_short_values_and_small_ones_stay_whole(binary: bool) -> None:
    many = body_of({"items": [{"text": f"river {at}"} for at in range(60_000)]}, binary)
    small = body_of({"items": [{"images": [{"data": os.urandom(UNCHECKED_NBYTES // 2)}]}]}, binary)
    for body in (many, small):
        assert without_long_values(body, binary) is body


def test_bodies_that_are_cut_or_lie_about_their_lengths_are_looked_through() -> None:
    lies = b"\x81\xa4data\xc6\xff\xff\xff\xff" + bytes(UNCHECKED_NBYTES)
    assert without_long_values(lies, binary=True) == lies[:11]
    quotes = b'{"items":[{"images":[{"data":"' + b"A" * (2 * UNCHECKED_NBYTES)
    assert without_long_values(quotes, binary=False).startswith(b'{"items":[{"images":[{"data":"')
