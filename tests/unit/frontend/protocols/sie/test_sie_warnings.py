"""Warnings of the SIE contract: parts of an item that a model does not read."""

from __future__ import annotations

import pytest

from frontend.protocols.sie.items import warnings_of
from frontend.protocols.sie.schemas import EncodeRequest, ExtractRequest, Item, Media, ScoreRequest
from ipc.catalog.entries import AdapterSource, ModelEntry
from ipc.catalog.option_names import TEXT_BESIDE_IMAGES
from ipc.wire.messages import ModelStatus
from workers.adapters.qwen3_vl import Qwen3VlRerankerAdapter
from workers.adapters.two_towers import TwoTowersAdapter

BOTH = Item(text="a river", images=[Media(b"1")])
TWO = Item(images=[Media(b"1"), Media(b"2")])
TEXT, SECOND = "the image or the text", "the first image"


def warned(request: EncodeRequest | ScoreRequest | ExtractRequest, *uses: str) -> list[str]:
    entry = ModelEntry(id="m", adapter="a", source=AdapterSource(), inputs=("text", "image"), outputs={})
    return warnings_of(request, entry, ModelStatus("m", "loaded", uses=list(uses)))


@pytest.mark.parametrize("kind", [EncodeRequest, ExtractRequest])
def test_a_text_beside_an_image_and_a_second_image_are_named(
    kind: type[EncodeRequest] | type[ExtractRequest],
) -> None:
    second = f"items[2].images[1:]: left out, this model reads {SECOND}"
    request = kind(items=[Item(text="a"), BOTH, TWO, BOTH])
    assert warned(request) == [f"items[1].text and 1 other items: left out, this model reads {TEXT}", second]
    assert warned(request, TEXT_BESIDE_IMAGES) == [second]


def test_the_query_of_a_score_is_looked_at_as_the_items_are() -> None:
    request = ScoreRequest(query=BOTH, items=[TWO])
    assert warned(request) == [
        f"query.text: left out, this model reads {TEXT}",
        f"items[0].images[1:]: left out, this model reads {SECOND}",
    ]


def test_families_say_whether_they_read_the_text_beside_an_image() -> None:
    assert TEXT_BESIDE_IMAGES in Qwen3VlRerankerAdapter.uses
    assert TEXT_BESIDE_IMAGES not in TwoTowersAdapter.uses
