"""What only fills a batch up, as every family that pads tells it, and that packed ones have none of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from ipc.metrics.registry import WorkerMetrics
from ipc.wire.messages import Call, EncodeCall, ExtractCall, InputItem, ScoreCall
from tests.conformance.extractors import required_library
from tests.fakes.adapter import FakeAdapter
from tests.tiny.models import build
from tests.tiny.pictures import encoded, picture
from tests.tiny.towers import TEXT_TOKENS
from tests.unit.workers.scheduling.test_batcher import job
from workers.adapters.base import Adapter, LoadContext, Prepared
from workers.adapters.registry import resolve
from workers.adapters.shared.encoder import TextEncoder
from workers.adapters.shared.image_extracting import patches
from workers.adapters.shared.packing import TokenSequence
from workers.scheduling.job import Batch, BatchCounts, Piece

TEXTS = (
    "Marie Curie lives in Paris beside the old river",
    "Marie Curie lives in Paris beside the old bridge",
    "Marie Curie lives in Paris beside the old wood",
)
"""Of lengths that run together wherever sequences are padded."""
SHORT = ("river", "old bridge", "wood")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Adapter]:
    """Opens a tiny model with its family, built once."""
    place = tmp_path_factory.mktemp("padding")

    def opened(family: str, name: str) -> Adapter:
        torch.set_num_threads(1)
        directory = place / name if (place / name).is_dir() else build(name, place / name)
        return resolve(family).load(
            LoadContext(directory, name, torch.device("cpu"), torch.float32, None, {}, lambda *_: None)
        )

    return opened


def prepared(adapter: Adapter, call: Call) -> list[Prepared]:
    """The items of a call; all of them can be used."""
    found = adapter.prepare(call.items, call)
    assert all(isinstance(one, Prepared) for one in found)
    return [one for one in found if isinstance(one, Prepared)]


def ratio(adapter: Adapter, items: Sequence[Prepared]) -> float:
    """Of one batch of these."""
    return adapter.padding_ratio(adapter.collate(items))


def beside_longest(counts: Sequence[int]) -> float:
    """The share of padding where these are filled up to the longest."""
    assert len(set(counts)) > 1
    return 1 - sum(counts) / (len(counts) * max(counts))


def extracting(texts: Sequence[str], *labels: str) -> ExtractCall:
    """A call to find something in texts."""
    return ExtractCall([InputItem(text) for text in texts], list(labels))


@pytest.mark.parametrize(("name", "expected"), [("dense_mpnet", 1 / 35), ("dense_mean", 0.0)])
def test_an_encoder_tells_what_its_rectangles_hold_beside_tokens(
    tmp_path: Path, name: str, expected: float
) -> None:
    encoder = TextEncoder(AutoModel.from_pretrained(build(name, tmp_path / name)).eval(), pad_id=1)
    batch = encoder.pack([TokenSequence(np.arange(10, 10 + length)) for length in (9, 5, 10, 10)])
    run: list[int] = []

    def note(model: torch.nn.Module, arguments: tuple[()], named: dict[str, torch.Tensor]) -> None:
        run.append(named["input_ids"].numel())

    encoder.model.register_forward_pre_hook(note, with_kwargs=True)
    with torch.inference_mode():
        encoder.token_rows(batch)
    assert encoder.padding_ratio([batch, batch]) == pytest.approx(expected)
    assert 1 - 34 / sum(run) == pytest.approx(expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("dense", "dense_mean"),
        ("cross_encoder", "rr_bert"),
        ("ner", "ner"),
        ("text_classification", "classifier"),
        ("nli_zero_shot", "nli"),
    ],
)
def test_packed_families_have_no_padding(load: Callable[[str, str], Adapter], family: str, name: str) -> None:
    adapter: Any = load(family, name)
    call: Call = extracting(TEXTS, *(["city"] if family == "nli_zero_shot" else []))
    if "encode" in adapter.spec.operations:
        call = EncodeCall(call.items, ["dense"])
    elif "score" in adapter.spec.operations:
        call = ScoreCall(call.items, InputItem("river"))
    assert adapter.packed and ratio(adapter, prepared(adapter, call)) == 0.0


@pytest.mark.parametrize(
    ("family", "name"), [("gliner", "gliner"), ("gliclass", "gliclass"), ("nli_zero_shot", "nli_bart")]
)
def test_families_that_read_labels_pad_texts_to_the_longest(
    load: Callable[[str, str], Adapter], family: str, name: str
) -> None:
    required_library(family if family.startswith("gli") else "transformers")
    adapter = load(family, name)
    items = prepared(adapter, extracting(TEXTS, "person"))
    assert ratio(adapter, items) == pytest.approx(beside_longest([one.cost for one in items]))
    assert ratio(adapter, items[:1]) == 0.0


def test_a_model_padded_to_the_longest_text_counts_pictures_as_full(
    load: Callable[[str, str], Adapter],
) -> None:
    adapter = load("clip", "clip")
    texts = prepared(adapter, EncodeCall([InputItem(text) for text in SHORT], ["dense"]))
    pictures = prepared(adapter, EncodeCall([InputItem(images=[encoded(picture(1))])] * 2, ["dense"]))
    counts = [one.cost for one in texts]
    assert ratio(adapter, texts) == pytest.approx(beside_longest(counts))
    assert ratio(adapter, pictures) == 0.0
    filled = len(counts) * max(counts) - sum(counts)
    tokens = sum(counts) + 2 * adapter.image_tokens
    assert ratio(adapter, [pictures[0], *texts, pictures[1]]) == pytest.approx(filled / (filled + tokens))


def test_a_model_padded_to_its_limit_pads_a_text_alone(load: Callable[[str, str], Adapter]) -> None:
    adapter = load("siglip", "siglip")
    [text] = prepared(adapter, EncodeCall([InputItem("river")], ["dense"]))
    assert ratio(adapter, [text]) == pytest.approx(1 - text.cost / TEXT_TOKENS)


def test_pages_and_queries_are_padded_apart_also_as_pairs(load: Callable[[str, str], Adapter]) -> None:
    adapter = load("colqwen2", "colqwen2")
    images = [InputItem(images=[encoded(one)]) for one in (picture(1, 28, 28), picture(2, 56, 56))]
    pages = prepared(adapter, EncodeCall(images, ["multivector"]))
    queries = prepared(adapter, EncodeCall([InputItem("river"), InputItem(TEXTS[0])], ["multivector"]))
    counts = [[one.cost for one in side] for side in (pages, queries)]
    tokens, places = sum(map(sum, counts)), sum(2 * max(side) for side in counts)
    assert ratio(adapter, pages) == pytest.approx(beside_longest(counts[0]))
    assert ratio(adapter, [*queries, *pages]) == pytest.approx(1 - tokens / places)
    pairs = prepared(adapter, ScoreCall(images, InputItem("river")))
    tokens, places = sum(counts[0]) + counts[1][0], 2 * max(counts[0]) + counts[1][0]
    assert ratio(adapter, pairs) == pytest.approx(1 - tokens / places)


def test_windows_of_pages_are_padded_to_the_longest(load: Callable[[str, str], Adapter]) -> None:
    adapter = load("document_qa", "layoutlm")
    metadata = [
        {"words": text.split(), "boxes": [[1, 1, 5, 5]] * len(text.split())} for text in (*TEXTS, "Paris")
    ]
    items = [InputItem(images=[encoded(picture(1))], metadata=one) for one in metadata]
    call = ExtractCall(items, instruction="where does she live")
    pages = prepared(adapter, call)
    assert ratio(adapter, pages) == pytest.approx(beside_longest([one.cost for one in pages]))


def test_labels_of_owlv2_are_padded_to_the_models_limit_once_each(
    load: Callable[[str, str], Adapter],
) -> None:
    adapter: Any = load("owlv2", "owlv2")
    items = [InputItem(images=[encoded(picture(1))])] * 2
    scenes = prepared(adapter, ExtractCall(items, ["cat", "wooden bridge"]))
    texts = [len(text) for text in scenes[0].payload.wanted.texts]
    limit = adapter._model.config.text_config.max_position_embeddings
    seen = 2 * patches(scenes[0].payload.inputs["pixel_values"])
    expected = 1 - (seen + sum(texts)) / (seen + 2 * limit)
    assert expected > 0 and ratio(adapter, scenes) == pytest.approx(expected)


def test_the_histogram_has_what_the_family_tells(load: Callable[[str, str], Adapter]) -> None:
    adapter = load("clip", "clip")
    items = prepared(adapter, EncodeCall([InputItem(text) for text in SHORT], ["dense"]))
    one = job([item.cost for item in items])
    one.adapter = adapter
    pieces = [Piece(one, at, item) for at, item in enumerate(items)]
    families = WorkerMetrics("worker-0")
    metrics = BatchCounts(families)
    for collated in (adapter.collate(items), None):
        metrics.note_batch("m", Batch(pieces, collated, one.cost, 0.0), 1000)
    [family] = families.padding.collect()
    samples = {sample.name: sample.value for sample in family.samples}
    expected = beside_longest([item.cost for item in items])
    assert samples["penstock_padding_ratio_sum"] == pytest.approx(expected)
    assert samples["penstock_padding_ratio_count"] == 1, "what was not collated as one has no share"


def test_a_family_whose_share_cannot_be_told_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    """An operator's own, which lays out what its base does not know."""

    class Strange(FakeAdapter):
        def padding_ratio(self, batch: Any) -> float:
            return float(batch.rows)

    one = job([5])
    one.adapter = Strange({}, 512)
    families = WorkerMetrics("worker-0")
    metrics = BatchCounts(families)
    for _ in range(3):
        metrics.note_batch("m", Batch([Piece(one, 0, Prepared(None, 5))], {"other": 1}, one.cost, 0.0), 1000)
    assert caplog.text.count("the padding of model m cannot be told: AttributeError") == 1
    samples = {sample.name: sample.value for sample in families.batch_size.collect()[0].samples}
    assert samples["penstock_batch_size_count"] == 3
